"""Decode windows of `qwen4_exp` on a GPU: 1 to 4 rows of one sequence, every tensor at a fixed place, nothing awaited.

Imported by GPU lanes and tests only (it needs triton). The same launches run on device "cpu" in Triton's interpreter.
Prompts run through the blocks beside this package, on whatever device they are.
"""
