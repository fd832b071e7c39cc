"""The errors of models, drawn:

    ModelError                 code              retryable
    ├── ConfigError            bad_model_config  no    a value of the pack's config is missing or out of range
    ├── WeightError            bad_weight        no    a dense tensor is missing or has the wrong shape
    └── WindowError            bad_window        no    a window does not continue its sequences' states

Every message names the key, tensor or row, then what was expected.
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of every error a model raises on purpose."""

    code = "model"
    retryable = False


class ConfigError(ModelError):
    """A config value is refused: names the key and what is allowed."""

    code = "bad_model_config"

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"config key {key!r}: {reason}")


class WeightError(ModelError):
    """A dense tensor is refused: names the tensor and what was expected."""

    code = "bad_weight"

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"tensor {name!r}: {reason}")


class WindowError(ModelError):
    """A window cannot run: names the row or slot and the reason."""

    code = "bad_window"
