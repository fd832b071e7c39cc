"""Load over the public doors of a running server, and the figures it gives: what `expressway bench` runs."""
