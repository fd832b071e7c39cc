"""Routed experts of a lane: who is kept (policy), where they lie (cache), what computes them (native), how (store)."""
