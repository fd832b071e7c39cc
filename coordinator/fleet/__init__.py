"""The lanes as the coordinator knows them: their states, their connections, and what an operator does with them."""
