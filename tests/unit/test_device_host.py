"""Copies between a seat and pinned memory: few, and the bytes of many."""

import pytest
import torch

from lanes.device.arena import Arena
from lanes.device.host import PinnedHost, _merged
from lanes.device.side import Side
from lanes.device.staging import Staging
from lanes.state.host import PLACE_BYTES, Arrival, cut, room_bytes

SPECS = [((3, 4), torch.float32), ((2,), torch.int64), ((200,), torch.float32), ((5, 2), torch.bfloat16)]


def memory() -> torch.Tensor:
    return torch.zeros(room_bytes(SPECS), dtype=torch.uint8)


def test_tensors_of_one_memory_are_one_copy():
    there, here = cut(memory(), SPECS), cut(memory(), SPECS)
    for number, tensor in enumerate(here):
        tensor.fill_(number + 1)
    (pair,) = _merged(list(zip(there, here, strict=True)))
    pair[0].copy_(pair[1])
    assert all(torch.equal(x, y) for x, y in zip(there, here, strict=True))
    assert pair[0].shape[0] <= room_bytes(SPECS)


@pytest.mark.parametrize("case", ["elsewhere", "other order", "further apart", "not whole", "empty"])
def test_what_does_not_follow_is_copied_apart(case):
    there, here = cut(memory(), SPECS), cut(memory(), SPECS)
    pairs = list(zip(there, here, strict=True))
    if case == "elsewhere":
        pairs = [(torch.empty_like(x), y) for x, y in pairs]
    elif case == "other order":
        pairs.reverse()
    elif case == "further apart":
        far = cut(torch.zeros(room_bytes(SPECS) + 4 * PLACE_BYTES, dtype=torch.uint8)[PLACE_BYTES:], SPECS)
        pairs = [(x, y) for x, y in zip(far, here, strict=True)][::2]
    elif case == "not whole":
        pairs = [(x[:1], y[:1]) if x.dim() == 1 else (x, y) for x, y in pairs]
        pairs = [(x[:, :1], y[:, :1]) if x.dim() == 2 else (x, y) for x, y in pairs]
    else:
        pairs = [(x[:0], y[:0]) for x, y in pairs]
    for number, (_, source) in enumerate(pairs):
        source.fill_(number + 1)
    merged = _merged(pairs)
    assert len(merged) == (0 if case == "empty" else len(pairs)) or case == "not whole"
    for to, source in merged:
        to.copy_(source)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("room", [1 << 16, 2048])
def test_what_is_kept_and_what_goes_out_and_back(room):
    arena, side = Arena(room, None), Side(torch.device("cpu"))
    host = PinnedHost(arena, side, Staging(side, room_bytes(SPECS)))
    seat = cut(memory(), SPECS)
    for number, tensor in enumerate(seat):
        tensor.fill_(number + 1)
    kept, arrival = host.keep(seat)
    arrival.wait()
    out = host.allocate_all(SPECS)
    host.out(list(zip(out, seat, strict=True))).wait()
    for tensor in seat:
        tensor.zero_()
    assert all(torch.equal(x, y) for x, y in zip(kept, out, strict=True))
    host.back(list(zip(seat, out, strict=True)))
    assert all(torch.equal(x, y) for x, y in zip(kept, seat, strict=True))
    assert [tensor.flatten()[0].item() for tensor in seat] == [1, 2, 3, 4]
    arena.close()


def test_another_tenant_finds_nothing_that_went_through():
    arena, side = Arena(1 << 16, None), Side(torch.device("cpu"))
    staging = Staging(side, room_bytes(SPECS))
    host = PinnedHost(arena, side, staging)
    seat = cut(memory(), SPECS)
    for tensor in seat:
        tensor.fill_(1)
    kept, _ = host.keep(seat)
    whole = staging.piece(staging.size_bytes).memory
    assert whole.any()
    host.erase()
    assert not whole.any()
    assert all(tensor.all() for tensor in kept), "what was kept is its own"
    arena.close()


def test_memory_outside_the_arena_is_not_zeroed_while_it_is_read():
    class Late(Arrival):
        """A copy that ends when somebody waits for it."""

        def wait(self) -> None:
            if late:
                torch.Tensor.copy_(*late.pop())

    class LateSide(Side):
        def computed(self) -> Arrival:
            return Late()

    late, side = [], LateSide(torch.device("cpu"))
    arena = Arena(4096, None)
    host = PinnedHost(arena, side, Staging(side, 4096))
    outside, there = torch.ones(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    late.append((there, outside))
    host.back([(torch.zeros(1), torch.ones(1))])
    host.wipe(outside)
    assert there.all(), "it was read first"
    assert not outside.any()
    arena.close()
