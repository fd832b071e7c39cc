"""What a sequence remembers between windows: its shape in bytes, its tensors, and a pool of slots under a budget."""
