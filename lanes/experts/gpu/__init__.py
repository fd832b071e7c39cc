"""Routed experts on a GPU: slots in its memory, tables it reads, launches of lanes.kernels.

Imported by GPU lanes and tests only: nothing else in `lanes` may import from here, for a CPU lane runs without triton.
"""
