"""The `qwen4_exp` text model (docs/model.md): one file per block, `model.py` lists them."""
