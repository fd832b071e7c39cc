"""Requests, tenants, lanes by address: everything between a client and the lanes, and the command line."""

from __future__ import annotations

from coordinator.errors import CoordinatorError

__all__ = ["CoordinatorError"]
