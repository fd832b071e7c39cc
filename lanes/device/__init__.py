"""The GPU of a lane: its start, its memory budget, and the shared region as it sees it. Not for CPU lanes."""
