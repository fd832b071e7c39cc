"""Shared pages against a twin that copies: the same rows, pages counted exactly, and gone when nobody holds them."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lanes.state.pages import PagedRows, PageMemory
from lanes.state.shape import Growing

MOST = 200
KINDS = [
    Growing("keys", 2, 128, torch.float32),  # 8 rows a page
    Growing("values", 3, 100, torch.bfloat16),  # rows that lie across two pages
    Growing("raw", 0, 64, torch.float32),
    Growing("blocks", 0, 640, torch.float32, 4),  # a row larger than half a page
]


def made(memory, of, rows=0):
    buffer = PagedRows(memory, of, MOST)
    buffer.resize(rows)
    return buffer


class Buffers(RuleBasedStateMachine):
    """Any order of growing, writing, branching, going back and ending."""

    @initialize(kind=st.sampled_from(KINDS))
    def begin(self, kind):
        self.memory, self.kind, self.clock = PageMemory(), kind, 0
        self.most = kind.rows(0, MOST).stop
        self.held = [self.fresh()]

    def fresh(self):
        return [PagedRows(self.memory, self.kind, MOST), np.zeros(self.kind.size(0), np.float32), 0]  # rows, length

    def pick(self, number):
        return self.held[number % len(self.held)]

    @rule(number=st.integers(0, 9), more=st.integers(0, 60))
    def write(self, number, more):
        """As a sequence does: room first, then rows past its length."""
        one = self.pick(number)
        buffer, twin, length = one
        rows = min(self.most, length + more)
        if rows > twin.shape[-2]:
            buffer.resize(rows)
            grown = np.zeros(self.kind.size(rows), np.float32)
            grown[..., : twin.shape[-2], :] = twin
            one[1] = twin = grown
        self.clock += 1
        new = (np.arange(twin[..., length:rows, :].size).reshape(twin[..., length:rows, :].shape) + self.clock) % 250
        twin[..., length:rows, :] = new
        buffer.tensor[..., length:rows, :] = torch.from_numpy(new).to(self.kind.dtype)
        one[2] = rows

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def branch(self, number, share):
        if len(self.held) > 6:
            return
        source, twin, length = self.pick(number)
        rows = int(share * length)
        other = self.fresh()
        before = self.memory.saved_bytes
        begun = other[0].share(source, rows)
        assert self.memory.saved_bytes - before == source.sharable_bytes(rows)
        other[0].resize(rows)
        other[0].tensor[..., begun:rows, :] = source.tensor[..., begun:rows, :]
        other[1:] = [twin[..., :rows, :].copy(), rows]
        self.held.append(other)

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def go_back(self, number, share):
        one = self.pick(number)
        one[2] = int(share * one[2])
        one[0].private(one[2])

    @rule(number=st.integers(0, 9))
    def end(self, number):
        one = self.pick(number)
        one[0].close()
        self.held = [each for each in self.held if each is not one] or [self.fresh()]

    @invariant()
    def rows_are_everybodys_own(self):
        for buffer, twin, length in getattr(self, "held", ()):
            got = buffer.tensor[..., :length, :].float().numpy()
            assert np.array_equal(got, twin[..., :length, :])

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "held"):
            return
        every = np.concatenate([buffer._pages.ravel() for buffer, _, _ in self.held])
        distinct = np.unique(every).size
        assert self.memory.saved_bytes == (every.size - distinct) * self.memory.page_bytes
        assert self.memory.taken_bytes <= distinct * self.memory.page_bytes


Buffers.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestBuffers = Buffers.TestCase


def test_a_page_is_zeroed_with_its_last_holder_and_a_tensor_outlives_its_buffer():
    memory = PageMemory()
    first, second = made(memory, KINDS[0], 40), PagedRows(memory, KINDS[0], MOST)
    first.tensor[:] = 7.0
    second.share(first, 40)
    second.resize(40)
    kept = second.tensor
    first.close()
    assert kept.eq(7.0).all()
    taken = memory.taken_bytes
    assert taken == 2 * 5 * memory.page_bytes
    second.close()
    assert memory.taken_bytes == 0
    assert not kept.any(), "mapped still, and nobody's"
    assert second.tensor.shape == (2, 0, 128)


def test_growing_keeps_addresses_of_the_file_and_copies_nothing():
    memory = PageMemory()
    buffer = made(memory, KINDS[0], 8)
    buffer.tensor[:] = 1.0
    taken = memory.taken_bytes
    buffer.resize(MOST)
    assert memory.taken_bytes == taken, "rows that nobody wrote take nothing"
    assert buffer.tensor[:, :8].eq(1.0).all()
    assert not buffer.tensor[:, 8:].any()


@pytest.mark.parametrize("rows", [0, 7, 8, 9, 16, 40])
def test_who_goes_back_leaves_the_others_rows_alone(rows):
    memory = PageMemory()
    first, second = made(memory, KINDS[0], 40), PagedRows(memory, KINDS[0], MOST)
    first.tensor[:] = torch.arange(40.0)[:, None]
    second.share(first, 40)
    second.resize(40)
    first.private(rows)
    first.tensor[:, rows:] = -1.0
    assert torch.equal(second.tensor[0, :, 0], torch.arange(40.0))
    assert torch.equal(first.tensor[1, :rows, 5], torch.arange(float(rows)))
    assert memory.saved_bytes == 2 * (rows // 8) * memory.page_bytes
