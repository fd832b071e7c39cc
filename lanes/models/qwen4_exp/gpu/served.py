"""Which models the kernels of a window know. Not here: whether they fit (lanes.device.budget).

Sizes up to these compile without spilling much and stay inside a program's shared memory; what the arithmetic itself
cannot do without (powers of two, a table's width) is refused as well. A lane on the CPU takes any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from triton.runtime.errors import OutOfResources

from lanes.errors import StartError
from lanes.kernels import index
from lanes.kernels.jobs import MOST_EXPERTS
from lanes.models.qwen4_exp.spec import Spec
from shared_experts.manifest import ExpertsInfo

MOST_HEAD = 256  # dimensions, of any kind of head
MOST_GROUP = 64  # query heads of one key/value head
MOST_INDEX_HEADS = 64
MOST_READ_TOKENS = 32_768  # the indexer's budget


@contextlib.contextmanager
def on_this_gpu() -> Iterator[None]:
    """While kernels run for the first time: StartError where a program of one needs more than this GPU's
    multiprocessors have."""
    try:
        yield
    except OutOfResources as error:
        raise StartError(
            f"--device cuda: a kernel of this model needs more {error.name} than this GPU has "
            f"({error.required}, {error.limit} are there); a pack with dense weights in bf16 needs half for them, "
            "and a lane on the CPU serves any"
        ) from error


def check_served(spec: Spec, info: ExpertsInfo, context_tokens: int) -> None:
    """StartError where the kernels do not know a format or size of this model, or a context as long as this."""
    if not info.layout.format.group:
        raise StartError(f"--device cuda: experts are {info.format}; GPU lanes read q4g64, q4g32 and q8")
    for name, size, most in (
        ("num_experts", spec.experts, MOST_EXPERTS),
        ("linear_key_head_dim", spec.key_dim, MOST_HEAD),
        ("linear_value_head_dim", spec.value_dim, MOST_HEAD),
        ("head_dim", spec.head_dim, MOST_HEAD),
        ("indexer_head_dim", spec.index_dim, MOST_HEAD),
        ("indexer_n_heads", spec.index_heads, MOST_INDEX_HEADS),
        ("num_attention_heads / num_key_value_heads", spec.heads // spec.kv_heads, MOST_GROUP),
        ("indexer_budget", spec.index_budget_tokens, MOST_READ_TOKENS),
    ):
        if size > most:
            raise StartError(f"--device cuda: {name} is {size}; GPU lanes know {most} at most")
    for name, size in (("linear_key_head_dim", spec.key_dim), ("linear_value_head_dim", spec.value_dim)):
        if size & (size - 1):
            raise StartError(f"--device cuda: {name} is {size}; GPU lanes need powers of two")
    if spec.ngram_layers and spec.ngram_dim % 2:
        raise StartError(f"--device cuda: ple_embed_dim is {spec.ngram_dim}; GPU lanes need an even number")
    blocks = context_tokens // spec.index_block_tokens
    if not index.serves(blocks, spec.index_topk):
        raise StartError(
            f"--device cuda: of a context of {context_tokens} tokens indexer_budget {spec.index_budget_tokens} leaves "
            f"too many candidates; a smaller --context is served"
        )
