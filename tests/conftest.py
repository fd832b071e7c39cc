"""Triton decides when it is first imported whether kernels are compiled or interpreted: interpreted without a GPU."""

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"
