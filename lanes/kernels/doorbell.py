"""The GPU's side of the CPU share's handshake inside other launches: ring the doorbell, wait for the done word.

Both words are in mapped host memory and drawn in lanes/native/share.h. One program of a launch that has work of its own
does either, so that no launch waits for the link: the doorbell rings while the experts' gate-up begins, and the answer
is awaited while their down runs. The wait ends when the word reaches its number, which the host also makes it do after
an error, so it never hangs; a waiting program holds one slot of a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels.arithmetic import INTERPRETED


@dataclass(frozen=True, slots=True)
class Word:
    """int64 [1] in mapped host memory, and the number that it shall become or is awaited to reach."""

    at: torch.Tensor
    number: int


@triton.jit
def ring(word, number):
    """The word becomes `number`; the host that sees it sees everything that earlier launches wrote."""
    if INTERPRETED:
        tl.store(word, number)
    else:
        at = tl.zeros((1,), tl.int64) + word.to(tl.int64)
        value = tl.zeros((1,), tl.int64) + number
        # One thread of the program: a fence of each warp would wait for the link once more.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p fence.acq_rel.sys;"
            " @p st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }", "=r,l,l", [at, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(word, number):
    """Returns when the word is at least `number`."""
    seen = tl.load(word, volatile=True)
    while seen < number:
        seen = tl.load(word, volatile=True)
