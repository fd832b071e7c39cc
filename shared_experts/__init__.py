"""Expert weights at rest (packs, checkpoints, codecs) and in host memory (the shared region); bytes only, no torch."""

from __future__ import annotations

from shared_experts.attach import AttachedRegion, attach
from shared_experts.errors import SharedExpertsError
from shared_experts.manifest import Manifest
from shared_experts.pack import Pack

__all__ = ["AttachedRegion", "Manifest", "Pack", "SharedExpertsError", "attach"]
