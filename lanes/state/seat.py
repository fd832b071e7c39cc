"""The place in a GPU's memory where the sequence that runs has its state; all others lie in host memory.

Its buffers have room for one sequence of full length and keep their addresses, so that captured graphs can hold them. A
sequence takes the seat before it runs and keeps it, running or not, until another one takes it: then its state moves to
host memory, with room for the tokens it has. While seated its tensors *are* the seat's, so everything else
(checkpoints, snapshots, copies) sees one state wherever it is.

Not here: who runs, how bytes move (host). Invariants: one occupant; memory that a sequence leaves is zeroed, and what
computes next finds that done.
"""

from __future__ import annotations

import weakref

import torch

from lanes.state.host import HERE, PLAIN, Host, cut, room_bytes
from lanes.state.sequence import AttentionState, SequenceState
from lanes.state.shape import AttentionShape, StateShape


class Seat:
    """Allocates everything at once. `home` has the tensors; its own length means nothing."""

    def __init__(self, shape: StateShape, capacity_tokens: int, device: torch.device | str, host: Host = PLAIN) -> None:
        self.home = SequenceState(shape, capacity_tokens, device=device)
        _in_slabs(self.home, capacity_tokens, device)
        _together(self.home, device)
        self._host = host
        self._occupant: weakref.ref[SequenceState] | None = None

    @property
    def occupant(self) -> SequenceState | None:
        """Whose state lies here; None once it is gone."""
        return self._occupant() if self._occupant is not None else None

    def take(self, state: SequenceState) -> None:
        """Moves a state of at most the seat's capacity here, and whoever was here to host memory."""
        if self.occupant is not state:
            self._leave(0)
            state.arrival.before_compute()
            self._sit(state, [(old, old.shape[-2]) for old in _rows(state)], given_up=True)

    def branch(self, state: SequenceState, root: SequenceState, tokens: int) -> None:
        """A state without rows takes the seat with another's first `tokens`: where that one is here, they stay here."""
        here = self.occupant is root
        self._leave(tokens if here else 0)
        rows = [each.rows(0, tokens).stop for holder in root.attention.values() for each in holder.shape.growing()]
        root.arrival.before_compute()
        kept = [(old[..., :0, :] if here else old, 0 if here else n) for old, n in zip(_rows(root), rows, strict=True)]
        self._sit(state, kept, given_up=False)

    def leave(self) -> None:
        """Moves the occupant, if any, to host memory."""
        self._leave(0)

    def _sit(self, state: SequenceState, rows: list[tuple[torch.Tensor, int]], *, given_up: bool) -> None:
        """Its tensors become the seat's, with so many rows of other ones; those are read no more where `given_up`."""
        assert state.capacity_tokens <= self.home.capacity_tokens, "the seat is as long as the longest sequence"
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (holder, home, name), (old, count) in zip(_growing(state, self.home), rows, strict=True):
            new = getattr(home, name)
            pairs.append((new[..., :count, :], old[..., :count, :]))
            setattr(holder, name, new)
        moved = [old for old, _ in rows] if given_up else []
        for part, its_home, name in _fixed(state, self.home):
            new, old = getattr(its_home, name), getattr(part, name)
            if state.blank:
                new.zero_()
            else:
                pairs.append((new, old))
                moved.append(old)
            setattr(part, name, new)
        self._host.back(pairs)
        for old in moved:
            self._host.wipe(old)
        state.blank, state.home, state.arrival = False, self._host, HERE
        self._occupant = weakref.ref(state)

    def _leave(self, kept_tokens: int) -> None:
        """The same; rows of the first tokens are zeroed later, by whoever has them from now on."""
        state, self._occupant = self.occupant, None
        if state is None:
            return
        # What has a fixed size is on its way while what grows is still being looked at.
        growing, fixed = _growing(state, self.home), _fixed(state, self.home)
        here = [getattr(home, name) for _, home, name in fixed]
        new = self._host.allocate_all([(tuple(tensor.shape), tensor.dtype) for tensor in here])
        first = self._host.out(list(zip(new, here, strict=True)))
        rows = state.allocated_tokens
        shapes = [each for holder in state.attention.values() for each in holder.shape.growing()]
        kept = [each.rows(0, rows).stop for each in shapes]
        old = [buffer[..., :count, :] for buffer, count in zip(_rows(self.home), kept, strict=True)]
        more = self._host.allocate_all([(each.size(n), each.dtype) for each, n in zip(shapes, kept, strict=True)])
        state.arrival, state.home = self._host.out(list(zip(more, old, strict=True))), None
        first.before_compute()
        for (holder, _, name), tensor in zip((*fixed, *growing), (*new, *more), strict=True):
            setattr(holder, name, tensor)
        state.arrival.before_compute()
        for holder in self.home.attention.values():
            for each in holder.shape.growing():
                getattr(holder, each.name)[..., each.rows(0, kept_tokens).stop :, :].zero_()
        for tensor in self.home.fixed():
            tensor.zero_()


def _together(home: SequenceState, device: torch.device | str) -> None:
    """Its tensors of fixed size, zero, in one memory, so that all of them are one copy."""
    places = _fixed(home, home)
    specs = [(tuple(tensor.shape), tensor.dtype) for tensor in (getattr(each, name) for each, _, name in places)]
    memory = torch.zeros(room_bytes(specs), dtype=torch.uint8, device=device)
    for (holder, _, name), tensor in zip(places, cut(memory, specs), strict=True):
        setattr(holder, name, tensor)


def _in_slabs(home: SequenceState, rows: int, device: torch.device | str) -> None:
    """Its growing buffers, zero: those of one name and of layers of one shape lie together, so that what is done to all
    of them is one copy."""
    alike: dict[AttentionShape, list[AttentionState]] = {}
    for attention in home.attention.values():
        alike.setdefault(attention.shape, []).append(attention)
    for shape, holders in alike.items():
        for each in shape.growing():
            size = (len(holders), *each.size(each.rows(0, rows).stop))
            for holder, buffer in zip(holders, torch.zeros(size, dtype=each.dtype, device=device), strict=True):
                setattr(holder, each.name, buffer)


def _growing(state: SequenceState, home: SequenceState) -> list[tuple[AttentionState, AttentionState, str]]:
    """(its holder, the seat's, name) of every growing buffer."""
    return [
        (its, home.attention[layer], each.name)
        for layer, its in state.attention.items()
        for each in its.shape.growing()
    ]


def _rows(state: SequenceState) -> list[torch.Tensor]:
    """Its growing buffers, in the same order."""
    return [getattr(holder, each.name) for holder in state.attention.values() for each in holder.shape.growing()]


def _fixed(state: SequenceState, home: SequenceState) -> list[tuple[object, object, str]]:
    """The same of every tensor of fixed size that lies where the seat does."""
    found: list[tuple[object, object, str]] = []
    for layer, recurrent in state.recurrent.items():
        found += [(recurrent, home.recurrent[layer], name) for name in ("matrix", "conv")]
    found += [(ngram, home.ngram[layer], "conv") for layer, ngram in state.ngram.items()]
    if state.draft is not None:
        found.append((state.draft, home.draft, "streams"))
    return found
