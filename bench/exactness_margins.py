"""What is equal within the pack's tolerance: other cuts of the same tokens, and the lane on the CPU.

A case says how far apart logits are, of each row's greatest one: the median row, one in a hundred, the worst; it raises
Apart over the tolerance. Not here: what is equal to the bit (exactness_cases), the tolerance (lanes.tolerance).

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from bench.exactness_cases import TRIALS, Case, Ground, close, trials
from bench.near_tie import tolerance


class Apart(AssertionError):
    """Farther than the tolerance; the text has the figures."""


def apart(got: torch.Tensor, want: torch.Tensor, allowed: float) -> str:
    """How far logits [T, V] are apart; raises Apart over the tolerance, or where a sure token is another one."""
    scale = want.abs().amax(-1)
    offs = ((got - want).abs().amax(-1) / scale).nan_to_num(float("inf"))
    top = want.topk(2, dim=-1)
    sure = (top.values[:, 0] - top.values[:, 1]) / scale > 2 * allowed
    other = int((got.argmax(-1) != top.indices[:, 0])[sure].sum())
    median, most = float(offs.median()), float(offs.max())
    text = (
        f"median {median:.1e}, 99th {float(offs.quantile(0.99)):.1e}, most {most:.1e} of scale ({allowed:.0e}), "
        f"{other} other ids of {int(sure.sum())} sure ones in {len(offs)}"
    )
    if most > allowed or other:
        raise Apart(text)
    return text


def sizes(ground: Ground) -> str:
    """Windows of two, three and four rows against single ones."""
    lane = ground.lane()
    want = ground.said(lane)
    got = torch.cat([ground.said(lane, [rows]) for rows in (2, 3, 4)])
    return apart(got, want.repeat(3, 1), tolerance(ground.pack))


def drafted(ground: Ground) -> str:
    """Trial windows of every length and outcome against single rows."""
    lane = ground.lane()
    want, got = ground.said(lane), []
    for rows, right in TRIALS:
        got.append(trials(lane, ground, rows, right, 0, wrong=True)[0])
    return apart(torch.cat(got), torch.cat([want[: len(each)] for each in got]), tolerance(ground.pack))


def chunks(ground: Ground) -> str:
    """A prompt in chunks of other sizes, then single rows."""
    lane, got = ground.lane(), []
    want = ground.said(lane)
    for rows in (ground.prompt // 2, ground.prompt // 3, 64, 17):
        slot = lane.states.open(ground.context_tokens)
        lane.windows(ground.ids[: ground.prompt], slot, [rows], logits="none")
        got.append(lane.windows(ground.rest, slot, [1]))
        close(lane, slot)
    return apart(torch.cat(got), want.repeat(len(got), 1), tolerance(ground.pack))


def against_the_cpu(ground: Ground) -> str:
    """The lane on the CPU, every window size."""
    mixed = (1, 2, 3, 4, 4, 1, 3)
    return apart(ground.said(ground.lane(), mixed), ground.said(ground.cpu(), mixed), tolerance(ground.pack))


def guesses(ground: Ground) -> str:
    """The draft layer's guesses after windows and trial windows, as on the CPU."""
    found = []
    for lane in (ground.lane(drafts=True), ground.cpu(drafts=True)):
        slot, rows = lane.begin(ground.ids[: ground.prompt]), []
        for at in range(ground.prompt, len(ground.ids) - 2, 2):
            rows += [lane.model.guess(lane.states[slot], ground.ids[at + n], n).cpu().clone() for n in range(3)]
            lane.experts.end_window()
            lane.trial([ground.ids[at], ground.ids[at + 1], 5], slot, 2)
        found.append(torch.stack(rows))
    return apart(found[0], found[1], tolerance(ground.pack))


MARGINS: dict[str, Case] = {
    "windows of 1 to 4 rows": sizes,
    "drafts on and off": drafted,
    "chunk sizes": chunks,
    "lane on the CPU": against_the_cpu,
    "guesses as on the CPU": guesses,
}
