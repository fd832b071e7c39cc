"""A real lane: a short request behind a long prompt waits for two chunks at most, and neither answer changes."""

from __future__ import annotations

import pytest

from laneproto.v1 import lane_pb2 as pb
from tests.fakes.processes import Host, collect, message, tiny_pack

LONG = [(k * k * 31 + k * 17) % 512 for k in range(6000)]
SHORT = [9, 8, 7, 6, 5, 4, 3]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    with Host(tiny_pack(folder, "q4g32"), folder) as host:
        host.owner()
        host.ready_lane("lane-0", "--prefill-chunk", "64", "--drafts", "0")
        yield host


def test_waits_two_chunks_at_most_and_changes_nothing(host):
    alone = [host.ask(prompt_ids=prompt, max_tokens=8)[0] for prompt in (SHORT, LONG)]
    with host.stub() as stub:
        assert stub.Hello(pb.HelloRequest(protocol_version=1)).model.visitor_tokens > 100
        # another tenant, so that nothing that was read alone is reused
        long = stub.Generate(message(request_id="long", prompt_ids=LONG, max_tokens=8, tenant_salt=b"other"))
        accepted = next(long)
        visits = []
        for number in range(4):
            visitor = message(
                request_id=f"short-{number}", prompt_ids=SHORT, max_tokens=8, interrupts="long", alone_ms=60_000,
                tenant_salt=b"other" if number % 2 else b"third",
            )  # fmt: skip
            visits.append(collect(stub.Generate(visitor)))
        ids, end = collect(iter([accepted, *long]))
    assert [visit[0] for visit in visits] == [alone[0]] * 4
    assert all(1 <= finished.usage.waited_windows <= 2 for _, finished in visits)
    assert ids == alone[1]
    assert (end.usage.cached_tokens, end.counters.prompt_tokens) == (0, len(LONG))
    assert end.counters.visits == 0
    assert all(finished.counters.visits == 1 for _, finished in visits)
