"""Triton kernels of a GPU lane's decode windows, and their naive twins (docs/gpu-kernels.md).

Imported by GPU code and by tests only: a CPU lane runs without triton, so nothing else in `lanes` may import from here
(`naive` alone needs no triton).

Every launch function takes tensors that exist, allocates nothing, never waits for the device and reads nothing back, so
that a window's launches can be captured as one graph. Sizes are compile-time constants, taken from shapes.
"""
