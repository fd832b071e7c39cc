"""The GPU's side of the CPU share's handshake as kernels: ring the doorbell, wait for the done word.

Both words are in mapped host memory and drawn in lanes/native/share.h. The wait ends when the word reaches its number,
which the host also makes it do after an error, so it never hangs. A waiting kernel holds one warp's slot; in return it
begins early (lanes.kernels.early), which a stream's own write and wait of words cannot, and lets the next one do so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.arithmetic import INTERPRETED


def ring(word: torch.Tensor, number: int) -> None:
    """word int64 [1] becomes `number`; the host that sees it sees everything that earlier launches wrote."""
    _ring[(1,)](word, number, num_warps=1, **early.options())


def wait(word: torch.Tensor, number: int) -> None:
    """Later launches run when word int64 [1] is at least `number`."""
    _wait[(1,)](word, number, num_warps=1, **early.options())


@triton.jit(do_not_specialize=["number"])
def _ring(word, number, EARLY: tl.constexpr):
    early.behind(EARLY)
    if INTERPRETED:
        tl.store(word, number)
    else:
        at = tl.zeros((1,), tl.int64) + word.to(tl.int64)
        value = tl.zeros((1,), tl.int64) + number
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [at, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def _wait(word, number, EARLY: tl.constexpr):
    early.behind(EARLY)
    seen = tl.load(word, volatile=True)
    while seen < number:
        seen = tl.load(word, volatile=True)
