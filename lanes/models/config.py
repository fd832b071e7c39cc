"""Typed, bounded reads from a config map whose values came from a file.

Not here: which keys a model needs (its spec). Invariant: a value that is returned has the type and lies in the range
that was asked for; anything else is a `ConfigError` that names the key and the range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lanes.models.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limit:
    """An inclusive range of integers."""

    least: int
    most: int

    def check(self, key: str, value: object) -> int:
        """`value` as an int inside the range."""
        if type(value) is not int:
            raise ConfigError(key, f"{_shown(value)} is not an integer in {self.least}..{self.most}")
        if not self.least <= value <= self.most:
            raise ConfigError(key, f"{_shown(value)} is not in {self.least}..{self.most}")
        return value


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads one map; `prefix` is put before every key in messages."""

    values: Mapping[str, object]
    prefix: str = ""

    def integer(self, key: str, limit: Limit, default: int | None = None) -> int:
        """An integer in `limit`; an absent or null key takes the default, or is an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(self.prefix + key, f"is missing; an integer in {limit.least}..{limit.most} is needed")
            return default
        return limit.check(self.prefix + key, value)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number in least..most."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
            raise ConfigError(self.prefix + key, f"{_shown(value)} is not a number in {least:g}..{most:g}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(self.prefix + key, f"{_shown(value)} is not true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of a few words."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(self.prefix + key, f"{_shown(value)} is not one of {', '.join(allowed)}")
        return value

    def items(self, key: str, most: int) -> list[object] | None:
        """A list of at most `most` items, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise ConfigError(self.prefix + key, f"{_shown(value)} is not a list of at most {most} items")
        return list(value)

    def section(self, key: str) -> ConfigReader:
        """A map inside the map; absent or null reads as empty."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(self.prefix + key, f"{_shown(value)} is not a map")
        return ConfigReader(value, f"{self.prefix}{key}.")


def _shown(value: object) -> str:
    """A value short enough for an error message, whatever a file put there."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."
