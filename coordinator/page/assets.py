"""The page's three files, read once: package data beside this module, no build step, nothing from anywhere else.

Not here: what they show (assets/page.js), who may read them (doors.page).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    path: str  # of its URL
    content_type: str
    body: bytes


def load() -> tuple[Asset, ...]:
    """All of them."""
    folder = resources.files("coordinator.page") / "assets"
    kinds = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"),
             "/page.js": ("page.js", "text/javascript")}  # fmt: skip
    return tuple(
        Asset(path, f"{kind}; charset=utf-8", (folder / name).read_bytes()) for path, (name, kind) in kinds.items()
    )
