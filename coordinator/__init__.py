"""Requests, tenants, lanes by address: everything between a client and the lanes, and the command line."""
