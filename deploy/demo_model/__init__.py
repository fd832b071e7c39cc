"""The recipe of the demo model: data, tokenizer, training, export, evaluation. README.md tells how to run it.

Not part of the installed program: nothing in `coordinator`, `lanes` or `shared_experts` imports it.
"""
