"""Measurements of a running cluster over its public doors, and of single parts in their own processes."""

from __future__ import annotations

from bench.aligned import Aggregate, Rules, Stamp, Stream, aligned_aggregate

__all__ = ["Aggregate", "Rules", "Stamp", "Stream", "aligned_aggregate"]
