from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.answer import Answer, Final, Piece
from coordinator.errors import Cancelled, LaneLost
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.request import Request
from coordinator.sampling import Sampling
from coordinator.text.detokenizer import Detokenizer
from laneproto.v1 import lane_pb2
from tests.unit.test_stops import naive


def request(stops: tuple[str, ...] = ()) -> Request:
    return Request("r", (1,), 5, Sampling(0.0, 0, 1.0, 0), (0,), stops, False, 0, None)


def generation(stops: tuple[str, ...] = ()) -> tuple[Generation, list[Generation]]:
    cancelled: list[Generation] = []
    return Generation(request(stops), on_cancel=cancelled.append), cancelled


def tokens(*ids: int) -> list[lane_pb2.Token]:
    return [lane_pb2.Token(id=token_id) for token_id in ids]


def ended(count: int = 0, reason: lane_pb2.FinishReason = lane_pb2.FINISH_REASON_LENGTH) -> Ended:
    return Ended(reason, lane_pb2.Usage(prompt_tokens=1, completion_tokens=count), lane_pb2.Counters(windows=3))


async def test_begun_then_tokens_then_one_end() -> None:
    one, _ = generation()
    one.begin("lane-0")
    assert one.push(tokens(1, 2))
    assert one.push(tokens(3))
    assert one.end(ended())
    assert not one.end(LaneLost("later"))
    assert one.push(tokens(4))  # after the end nothing is kept
    assert await one.read() == Begun("lane-0")
    event = await one.read()
    assert isinstance(event, Tokens)
    assert [token.id for token in event.tokens] == [1, 2, 3]
    assert await one.read() == await one.read() == ended()


async def test_what_came_before_an_error_is_read_before_it() -> None:
    one, _ = generation()
    one.begin("lane-0")
    one.push(tokens(1))
    one.end(LaneLost("gone"))
    await one.read()
    await one.read()
    with pytest.raises(LaneLost):
        await one.read()


async def test_a_cancelled_read_loses_nothing() -> None:
    one, _ = generation()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.read(), 0.01)
    waiting = asyncio.create_task(one.read())
    await asyncio.sleep(0)
    one.begin("lane-0")
    assert await waiting == Begun("lane-0")


async def test_a_reader_too_far_behind_is_found_at_the_bound() -> None:
    one, _ = generation()
    assert one.push(tokens(*range(limits.BUFFERED_TOKENS)))
    assert not one.push(tokens(1))
    await one.read()
    assert one.push(tokens(1))


async def test_cancel_reaches_dispatch_once_and_not_after_the_end() -> None:
    one, cancelled = generation()
    one.cancel()
    one.cancel()
    assert cancelled == [one]
    assert one.push(tokens(1))
    one.end(Cancelled("cancelled"))
    with pytest.raises(Cancelled):
        await one.read()
    other, cancelled = generation()
    other.end(ended())
    other.cancel()
    assert cancelled == []


ALPHABET = {1: b"a", 2: b"b", 3: b"<", 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b"ab<"}


async def read_all(answer: Answer) -> tuple[str, list[int], Final]:
    text, ids = "", []
    while True:
        event = await answer.read()
        if isinstance(event, Piece):
            text += event.text
            ids += [known.token.id for known in event.tokens]
        elif isinstance(event, Final):
            return text, ids, event


@given(
    ids=st.lists(st.integers(1, 6), max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "b<", "<a", "é", "\ufffd"]), max_size=3, unique=True),
    chunk=st.integers(1, 5),
    ends_by_id=st.booleans(),
)
def test_an_answer_is_the_text_up_to_the_first_stop(
    ids: list[int], stops: list[str], chunk: int, ends_by_id: bool
) -> None:
    async def run() -> None:
        one, cancelled = generation(tuple(stops))
        answer = Answer(one, Detokenizer(lambda token_id: ALPHABET.get(token_id, b"")))
        sent = [*ids, 0] if ends_by_id else ids
        one.begin("lane-0")
        pieces = [sent[at : at + chunk] for at in range(0, len(sent), chunk)]
        text, seen = "", []

        async def take() -> None:
            nonlocal text
            event = await answer.read()
            if isinstance(event, Piece):
                text += event.text
                seen.extend(known.token.id for known in event.tokens)

        await take()  # Begun
        for piece in pieces:
            one.push(tokens(*piece))
            if cancelled:
                break
            await take()
        one.end(ended(len(sent), lane_pb2.FINISH_REASON_STOP if ends_by_id else lane_pb2.FINISH_REASON_LENGTH))
        rest, more, final = await read_all(answer)
        expected, stopped = naive(b"".join(ALPHABET[i] for i in ids).decode(errors="replace"), stops)
        assert text + rest == expected
        assert final.stopped_by_text == stopped
        assert final.lane == "lane-0"
        if stopped:
            assert final.reason == lane_pb2.FINISH_REASON_STOP
            assert final.usage.completion_tokens <= len(sent)
        else:
            assert seen + more == sent
            assert final.usage.completion_tokens == len(sent)

    asyncio.run(run())


async def test_after_a_stop_string_a_lost_lane_is_not_the_clients_concern() -> None:
    one, cancelled = generation(("ab",))
    answer = Answer(one, Detokenizer(lambda token_id: ALPHABET.get(token_id, b"")))
    one.begin("lane-0")
    one.push(tokens(2, 1, 2, 1))
    await answer.read()
    event = await answer.read()
    assert isinstance(event, Piece)
    assert (event.text, len(event.tokens)) == ("b", 3)
    assert cancelled == [one]
    one.end(LaneLost("gone"))
    text, _, final = await read_all(answer)
    assert (text, final.reason, final.usage.completion_tokens) == ("", lane_pb2.FINISH_REASON_STOP, 3)


async def test_a_lost_lane_leaves_what_was_said() -> None:
    one, _ = generation(("ab",))
    answer = Answer(one, Detokenizer(lambda token_id: ALPHABET.get(token_id, b"")))
    one.begin("lane-0")
    one.push(tokens(2, 1))
    one.end(LaneLost("gone"))
    assert await answer.read() == Begun("lane-0")
    held = await answer.read()
    assert isinstance(held, Piece)
    rest = await answer.read()
    assert isinstance(rest, Piece)
    assert (held.text, rest.text) == ("b", "a")
    with pytest.raises(LaneLost):
        await answer.read()
