"""Lanes as processes: drafts by default, none, with a draft vocabulary; one answer, and what is told of it."""

import json

import pytest

from laneproto.v1 import lane_pb2 as pb
from tests.fakes.processes import Host, tiny_pack

PROMPT = [5, 9, 300, 11, 7, 7, 401, 12, 3, 88, 5, 9]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    (folder / "ids.json").write_text(json.dumps({"draft_vocabulary": 1, "ids": list(range(0, 512, 3))}))
    with Host(tiny_pack(folder, "f32"), folder) as host:
        host.owner()
        lanes = [
            host.lane("lane-0", "--drafts", "0"), host.lane("lane-1"),
            host.lane("lane-2", "--draft-vocab", str(folder / "ids.json"), "--drafts", "2"),
        ]  # fmt: skip
        for lane in lanes:
            lane.until("lane_ready")
        yield host


@pytest.mark.parametrize("sampling", [pb.Sampling(), pb.Sampling(temperature=0.8, seed=3, frequency_penalty=0.5)])
def test_every_lane_gives_the_same_answer(host, sampling):
    answers = [host.ask(f"lane-{n}", prompt_ids=PROMPT, max_tokens=60, sampling=sampling) for n in range(3)]
    assert answers[0][0] == answers[1][0] == answers[2][0]
    for ids, end in answers:
        counted = end.counters
        right = counted.drafts_right_at_1 + counted.drafts_right_at_2 + counted.drafts_right_at_3
        assert counted.decode_windows + right == len(ids) - 1
        assert end.usage.accepted_draft_tokens == right
        assert end.usage.draft_tokens == counted.drafts_at_1 + counted.drafts_at_2 + counted.drafts_at_3
        assert end.usage.completion_tokens == len(ids)
    assert answers[0][1].usage.draft_tokens == 0
    assert answers[2][1].counters.drafts_at_3 == 0


def test_times_of_windows_are_told(host):
    """Whether a draft is tried is a matter of time; that its time is known is not."""
    prompt = [*range(20, 40)] * 5
    ids, end = host.ask("lane-1", prompt_ids=prompt, max_tokens=40)
    assert ids == host.ask("lane-0", prompt_ids=prompt, max_tokens=40)[0]
    with host.stub("lane-1") as stub:
        status = stub.Hello(pb.HelloRequest(protocol_version=1)).status
    times = {each.rows: each for each in status.decode_times}
    assert sum(each.windows for each in times.values()) == status.counters.decode_windows >= end.counters.decode_windows
    assert times[1].windows > 0
    assert all(each.mean_ns > 0 for each in times.values())


def test_a_vocabulary_that_does_not_fit_is_refused_at_the_start(host):
    (host.folder / "bad.json").write_text(json.dumps({"draft_vocabulary": 1, "ids": [5, 512]}))
    lane = host.lane("lane-9", "--draft-vocab", str(host.folder / "bad.json"))
    assert lane.wait() == 65
    assert "an id is not in the model's vocabulary of 512" in lane.text()
