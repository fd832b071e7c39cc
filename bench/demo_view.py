"""What the demo shows a person: two answers side by side while they come, then the figures.

Not here: where the figures come from. Invariant: on a stream that is not a terminal nothing is redrawn; each finished
answer is printed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bench.aligned import Aggregate
from bench.client import Answer
from bench.memory import RegionMemory

SHOWN_LINES = 12


class SideBySide:
    """A column per agent; `begin` starts a question, `add` appends what came."""

    def __init__(self, console: Console, agents: Sequence[str]) -> None:
        self._console = console
        self._texts = {agent: Text() for agent in agents}
        self._live = Live(self._draw(), console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> SideBySide:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.update(self._draw())
            self._live.stop()
        else:
            self._console.print(self._draw())

    def begin(self, agent: str, question: str) -> None:
        """A new question of `agent`."""
        self._texts[agent].append(("\n" if self._texts[agent].plain else "") + f"{question}\n", style="bold cyan")

    def add(self, agent: str, text: str) -> None:
        """More of the answer; control characters are shown, not obeyed."""
        self._texts[agent].append("".join(c if c.isprintable() or c == "\n" else "·" for c in text))
        if self._live:
            self._live.update(self._draw())

    def _draw(self) -> Columns:
        width = max(30, self._console.width // len(self._texts) - 2)
        panels = []
        for agent, text in self._texts.items():
            lines = text.wrap(self._console, width - 4)[-SHOWN_LINES:]
            panels.append(Panel(Group(*lines), title=agent, width=width, height=SHOWN_LINES + 2))
        return Columns(panels)


def summary(console: Console, answers: Sequence[Answer], total: Aggregate, memory: RegionMemory) -> None:
    """The requests, the aggregate and the memory proof as tables."""
    table = Table("agent", "lane", "first token", "tokens", "ended", box=None, title="requests", title_justify="left")
    for a in answers:
        first = "-" if a.ttft_s is None else f"{a.ttft_s * 1e3:.0f} ms"
        table.add_row(a.session, a.lane, first, str(len(a.stamps_s)), a.finish_reason)
    console.print(table)
    figure = f"{total.tokens} tokens in a common window of {total.window_s:.1f} s = {total.tokens_per_s:.1f} tokens/s"
    per_lane = ", ".join(f"{lane} {total.lane_tokens_per_s(lane):.1f}" for lane in sorted(total.lane_tokens))
    console.print(f"[bold]aggregate[/]  {figure} ({per_lane})")
    for reason in total.reasons:
        console.print(f"           not valid: {reason}")
    console.print(
        f"[bold]memory[/]     the experts' region of {mib(memory.region_bytes)} is in RAM once: "
        f"all mappings of it sum to {mib(memory.mapping_pss_bytes_sum)}.\n"
        f"           The second lane added {mib(memory.last_lane_added_bytes)} of its own (process and torch, dense "
        "weights, expert cache, state) and no expert."
    )


def mib(n: int) -> str:
    """Bytes as MiB."""
    return f"{n / 2**20:.1f} MiB"
