"""Which models the kernels of a window know. Not here: whether they fit (lanes.device.budget)."""

from __future__ import annotations

from lanes.errors import StartError
from lanes.kernels.jobs import MOST_EXPERTS
from lanes.models.qwen4_exp.spec import Spec
from shared_experts.manifest import ExpertsInfo


def check_served(spec: Spec, info: ExpertsInfo) -> None:
    """StartError where the kernels do not know a format or size of this model."""
    if not info.layout.format.group:
        raise StartError(f"--device cuda: experts are {info.format}; GPU lanes read q4g64, q4g32 and q8")
    for name, size in (("linear_key_head_dim", spec.key_dim), ("linear_value_head_dim", spec.value_dim)):
        if size & (size - 1) or spec.key_dim != spec.value_dim:
            raise StartError(f"--device cuda: {name} is {size}; GPU lanes need equal powers of two for keys and values")
    if spec.experts > MOST_EXPERTS:
        raise StartError(f"--device cuda: {spec.experts} experts a layer; GPU lanes route {MOST_EXPERTS} at most")
