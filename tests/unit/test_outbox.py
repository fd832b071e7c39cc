import asyncio
import threading

from lanes.counters import Counters
from lanes.outbox import End, Outbox, Token

END = End("stop", 1, 1, Counters())


def token(i):
    return Token(i, 0, None)


async def test_order_and_end_across_threads():
    box = Outbox(asyncio.get_running_loop(), 8)

    def write():
        for i in range(500):
            assert box.put(token(i), lambda: False, 10)
        box.finish(END)

    thread = threading.Thread(target=write)
    thread.start()
    events = []
    while not events or not isinstance(events[-1], End):
        batch = await box.take()
        assert 1 <= len(batch) <= 9
        events += batch
    thread.join()
    assert [e.id for e in events[:-1]] == list(range(500))


async def test_full_box_gives_up_after_the_patience_and_still_takes_the_end():
    box = Outbox(asyncio.get_running_loop(), 2)
    assert box.put(token(0), lambda: False, 0)
    assert box.put(token(1), lambda: False, 0)
    assert not box.put(token(2), lambda: False, 0.0)
    box.finish(END)
    assert [getattr(e, "id", "end") for e in await box.take()] == [0, 1, "end"]


async def test_full_box_stops_waiting_when_cancelled():
    box = Outbox(asyncio.get_running_loop(), 1)
    box.put(token(0), lambda: False, 0)
    assert box.put(token(1), lambda: True, 1e9)
    assert len(await box.take()) == 1


async def test_nothing_is_kept_after_close():
    box = Outbox(asyncio.get_running_loop(), 1)
    box.put(token(0), lambda: False, 0)
    box.close()
    for i in range(100):
        assert box.put(token(i), lambda: False, 0)
    box.finish(END)
    assert not box._events


async def test_close_frees_a_writer_that_waits():
    box = Outbox(asyncio.get_running_loop(), 1)
    box.put(token(0), lambda: False, 0)
    writer = threading.Thread(target=lambda: box.put(token(1), lambda: False, 1e9))
    writer.start()
    box.close()
    await asyncio.to_thread(writer.join, 10)
    assert not writer.is_alive()


async def test_one_wake_up_for_many_tokens():
    class Loop:
        calls = 0

        def call_soon_threadsafe(self, call):
            self.calls += 1
            call()

    loop = Loop()
    box = Outbox(loop, 1000)
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)  # the reader sleeps now
    for i in range(100):
        box.put(token(i), lambda: False, 0)
    assert loop.calls == 1
    assert len(await reader) == 100
    box.put(token(1), lambda: False, 0)
    assert loop.calls == 1  # nobody sleeps
