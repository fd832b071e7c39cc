"""The model as training runs it: vectorised torch modules whose parameters have the checkpoint's names."""
