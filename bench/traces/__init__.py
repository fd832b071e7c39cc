"""Routing traces for the expert cache: frozen synthetic ones (synthetic) and how they were chosen (README.md)."""
