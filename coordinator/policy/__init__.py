"""What decides about requests: whose turn it is, who is let in, which lane. Pure: `now` is an argument everywhere."""
