"""Measurements of a running cluster over its public doors, and of single parts in their own processes."""
