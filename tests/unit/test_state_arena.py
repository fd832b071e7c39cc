"""The arena: places that never overlap, are zero when they are given out, and come back when nothing refers to them."""

import errno
import functools
import gc
import mmap
import random
import threading

import pytest
import torch

from lanes.device import arena as arenas
from lanes.device.arena import ALIGNMENT_BYTES, Arena
from lanes.device.registered import Registered
from lanes.errors import HostMemoryTooSmall
from shared_experts import host_memory
from tests.unit.test_device_start import Driver


@pytest.fixture
def arena():
    made = Arena(1 << 20, None)
    yield made
    made.close()


def test_a_place_comes_back_zeroed(arena):
    tensor = arena.allocate((3, 5), torch.float32)
    assert tensor in arena
    tensor.fill_(7)
    view = tensor[1]
    del tensor
    arena.flush()
    assert arena.free_bytes == (1 << 20) - ALIGNMENT_BYTES, "a view holds it"
    del view
    arena.flush()
    assert arena.free_bytes == 1 << 20
    assert not arena._bytes.any()


def test_at_its_size_and_one_byte_over(arena):
    whole = arena.allocate((1 << 20,), torch.uint8)
    assert whole in arena
    more = arena.allocate((1,), torch.uint8)
    assert more not in arena
    del whole
    assert arena.allocate((1 << 20,), torch.uint8) in arena, "what is being zeroed is waited for"
    assert arena.allocate(((1 << 20) + 1,), torch.uint8) not in arena
    assert arena.allocate((0, 4), torch.float32).shape == (0, 4)


def test_many_tensors_of_any_size_never_overlap(arena):
    rng, held = random.Random(3), []
    for number in range(3000):
        if held and rng.random() < 0.5:
            value, tensor = held.pop(rng.randrange(len(held)))
            assert (tensor == value).all()
        else:
            tensor = arena.allocate((rng.randrange(1, 60_000),), torch.uint8)
            if tensor in arena:
                assert not tensor.any()
            tensor.fill_(number % 251 + 1)
            held.append((number % 251 + 1, tensor))
    del tensor
    held.clear()
    arena.flush()
    assert arena.free_bytes == 1 << 20
    assert arena._free == [(0, 1 << 20)]


def test_what_is_asked_for_later_comes_before_the_memory_goes(arena):
    tensor, gate, seen = arena.allocate((64,), torch.uint8), threading.Event(), []
    tensor.fill_(1)
    held = [tensor]

    def read() -> None:
        gate.wait(60)
        seen.append(held.pop()[0].item())

    arena.later(read)
    del tensor
    gate.set()
    arena.flush()  # the reading
    arena.flush()  # the zeroing that it led to
    assert seen == [1]
    assert arena.free_bytes == 1 << 20


def test_who_needs_a_place_does_not_wait_for_the_thread(arena):
    """It has low priority, and may be at something else; what is needed is zeroed by who needs it, and no more."""
    gate, begun = threading.Event(), threading.Event()
    tensors = [arena.allocate((size,), torch.uint8) for size in (300_000, 500_000, 200_000)]
    for tensor in tensors:
        tensor.fill_(7)
    arena.later(lambda: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    del tensor
    tensors.clear()
    first = arena.allocate((400_000,), torch.uint8)
    second = arena.place(90_001)
    assert first in arena
    assert second in arena
    assert not first.any()
    assert not second.any()
    assert int((arena._bytes == 7).sum()) >= 1_000_000 - 400_000 - 90_001 - 2 * 512, "the rest is the thread's"
    gate.set()
    arena.flush()
    arena.flush()
    assert arena.free_bytes == (1 << 20) - 400_384 - 90_112
    assert not arena._bytes.any()
    assert not first.fill_(1)[-1] - 1


@pytest.mark.parametrize("size", [1, 4096, 4 * 4096 - 1, 100_001, 900_000])
def test_much_is_zeroed_by_several_threads(monkeypatch, arena, size):
    monkeypatch.setattr(arenas, "ZEROED_AT_A_TIME_BYTES", 4096)
    monkeypatch.setattr(arenas.os, "sched_getaffinity", lambda process: {0, 1, 2})
    gate, begun, kept = threading.Event(), threading.Event(), []
    monkeypatch.setattr(arenas, "keep_to", lambda cores: kept.append(cores))
    before = arena.allocate((100,), torch.uint8)
    tensor = arena.allocate((950_000,), torch.uint8).fill_(7)
    arena.later(lambda: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    del tensor
    arena._take((1 << 20) - 950_272 - 512)  # nothing else is there
    found = arena.place(size)
    assert not found.any()
    assert not before.any()
    assert len(kept) == (0 if size < 2 * 4096 else 3)
    assert int((arena._bytes == 7).sum()) >= 950_000 - size - 512
    gate.set()


@pytest.mark.parametrize("code", [0, 1])
def test_memory_that_a_driver_refuses_is_as_good(code):
    driver = Driver(codes={"cuMemHostRegister_v2": code})
    registered = Registered(load=lambda name: driver)
    arena = Arena(1 << 16, registered)
    assert arena.pinned == (code == 0)
    tried = mmap.PAGESIZE if code else 1 << 16  # of a driver that takes nothing, no more than a page is asked
    assert [(size, flags) for _, size, flags in driver.registered] == [(tried, 1)]
    assert registered.bytes == (1 << 16) * (code == 0)
    assert arena.allocate((16,), torch.uint8) in arena
    arena.close()
    assert code or driver.registered == []


def test_a_forgotten_one_leaves_no_registration_and_no_thread():
    """Else the driver would copy from its old pages whatever came to lie at its addresses."""
    driver = Driver()
    arena = Arena(1 << 16, Registered(load=lambda name: driver))
    thread, kept = arena._thread, arena.allocate((8,), torch.float32)
    assert arena.pinned
    assert driver.registered
    del arena
    gc.collect()
    assert not driver.registered
    assert not thread.is_alive()
    assert not kept.any(), "a tensor that outlives it is plain memory"


def test_whoever_lets_go_of_the_last_reference_needs_no_context():
    """The garbage collector runs on any thread, the arena's own among them."""
    driver = Driver()
    held = [Arena(1 << 16, Registered(load=lambda name: driver)) for _ in range(2)]
    own, letting_go = held.pop(), threading.Event()

    def let_go(arena: list[Arena]) -> None:
        letting_go.wait()
        arena.clear()

    thread, box = own._thread, [own]
    own.later(functools.partial(let_go, box))
    del own, box
    letting_go.set()
    thread.join()
    assert len(driver.registered) == 1
    other = threading.Thread(target=held.clear)
    other.start()
    other.join()
    assert not driver.registered


def test_without_a_driver_nothing_is_registered():
    def load(name: str) -> None:
        raise OSError(name)

    registered = Registered(load=load)
    assert not registered.add(1 << 20, 1 << 12)
    registered.drop(1 << 20)
    registered.close()
    assert registered.bytes == 0


def test_nobody_waits_for_a_thread_that_a_failed_copy_has_ended(arena, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda given: failed.append(given.exc_type))

    def copy() -> None:
        raise RuntimeError("the device is gone")

    held = arena.allocate((1 << 20,), torch.uint8)
    arena.later(copy)
    assert arena.allocate((16,), torch.uint8) not in arena
    assert failed == [RuntimeError]
    del held


def test_a_kernel_without_huge_pages_is_as_good(monkeypatch):
    class Map(mmap.mmap):
        def madvise(self, option: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "not configured")
            super().madvise(option)

    monkeypatch.setattr(mmap, "mmap", Map)
    arena = Arena(1 << 16, None)
    assert arena.allocate((16,), torch.uint8) in arena
    arena.close()


@pytest.mark.parametrize("size_bytes", [1 << 62, 1 << 70])
def test_more_than_there_is_is_an_error_with_a_name(size_bytes):
    with pytest.raises(HostMemoryTooSmall, match="--state-budget"):
        Arena(size_bytes, None)


def test_memory_that_would_be_taken_whole_is_there_or_is_not_taken(monkeypatch):
    monkeypatch.setattr(host_memory, "floor_bytes", lambda: 1 << 20)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: (1 << 20) + (1 << 16))
    Arena(1 << 16, Registered(load=lambda name: Driver())).close()
    with pytest.raises(
        HostMemoryTooSmall, match="take 1 MiB of host memory, and 0 MiB can be had: give less of either"
    ):
        Arena((1 << 16) + 1, Registered(load=lambda name: Driver()))


def no_driver(name: str) -> object:
    raise OSError(name)


@pytest.mark.parametrize("load", [no_driver, lambda name: Driver(codes={"cuMemHostRegister_v2": 801})])
def test_memory_that_nobody_registers_is_taken_as_it_is_used_and_not_asked_for_whole(load, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    arena = Arena(1 << 20, Registered(load=load))
    assert not arena.pinned
    assert arena.allocate((16,), torch.uint8) in arena
    arena.close()


def test_whether_the_driver_takes_memory_is_tried_with_a_page_that_it_has_no_longer():
    driver = Driver()
    registered = Registered(load=lambda name: driver)
    assert registered.tries(0x7000_0000_0000)
    assert (driver.registered, registered.bytes) == ([], 0)
