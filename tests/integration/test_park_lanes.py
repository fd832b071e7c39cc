"""Conversations move between lane processes through the owner's pool: bit-equal to staying, also after a SIGKILL."""

import time

from laneproto.v1 import lane_pb2 as pb
from tests.fakes.processes import Host, tiny_pack

PROMPT = [(7 * n * n + 3 * n) % 500 for n in range(300)]


def until_parked(host, name, tokens):
    """Waits until that lane has heard of a parked conversation of so many tokens."""
    end = time.monotonic() + 60
    with host.stub(name) as stub:
        while True:
            told = next(iter(stub.Prefixes(pb.PrefixesRequest()))).added
            if (tokens, pb.PREFIX_PLACE_PARKED) in {(prefix.tokens, prefix.place) for prefix in told}:
                return
            assert time.monotonic() < end, told
            time.sleep(0.02)


def talk(host, name, prompt, salt):
    """The ids, every log-probability, and the end of one turn."""
    with host.stub(name) as stub:
        request = pb.GenerateRequest(
            request_id="r", prompt_ids=prompt, max_tokens=6, logprobs=True, top_logprobs=5, tenant_salt=salt,
            checkpoint_positions=[200],
        )  # fmt: skip
        events = list(stub.Generate(request))
    tokens = [token for event in events for token in event.tokens.tokens]
    for token in tokens:
        token.ClearField("stamp_ns")
    return [token.id for token in tokens], [token.SerializeToString() for token in tokens], events[-1].finished.usage


def test_parked_on_one_lane_resumed_on_another(tmp_path):
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        host.owner("--park", str(64 << 20))
        # drafts change the cut into windows by measured times, and so last bits; the state that is moved does not
        park = ("--park", str(host.run / "park.sock"), "--drafts", "0")
        first, _ = host.ready_lane("lane-0", *park), host.ready_lane("lane-1", *park)

        ids, _, usage = talk(host, "lane-0", PROMPT, b"a")
        assert usage.cached_tokens == 0
        until_parked(host, "lane-1", 305)
        following = [*PROMPT, *ids, 9, 8]
        _, moved, usage = talk(host, "lane-1", following, b"a")
        assert (usage.cached_tokens, usage.restored_tokens) == (305, 305)
        _, stayed, usage = talk(host, "lane-0", following, b"a")
        assert (usage.cached_tokens, usage.restored_tokens) == (305, 0)
        assert moved == stayed, "not the same to the bit"

        ids, _, _ = talk(host, "lane-0", PROMPT[:280], b"b")
        until_parked(host, "lane-1", 285)
        first.kill()
        following = [*PROMPT[:280], *ids, 9, 8]
        _, after_death, usage = talk(host, "lane-1", following, b"b")
        assert (usage.cached_tokens, usage.restored_tokens) == (285, 285)
        ids_again, _, _ = talk(host, "lane-1", PROMPT[:280], b"c")  # the same turns by somebody who stays
        assert ids_again == ids
        _, stayed, usage = talk(host, "lane-1", following, b"c")
        assert usage.restored_tokens == 0
        assert after_death == stayed


def test_lanes_of_two_kv_formats_share_no_conversation_and_say_what_they_are(tmp_path):
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        host.owner("--park", str(64 << 20))
        park = ("--park", str(host.run / "park.sock"), "--drafts", "0")
        host.ready_lane("lane-0", *park)
        host.ready_lane("lane-1", *park, "--kv", "int8")
        ids, _, usage = talk(host, "lane-0", PROMPT, b"a")
        assert list(usage.approximations) == []
        until_parked(host, "lane-1", 305)
        following = [*PROMPT, *ids, 9, 8]
        _, _, usage = talk(host, "lane-1", following, b"a")
        assert list(usage.approximations) == ["kv-int8"]
        assert (usage.cached_tokens, usage.restored_tokens) == (0, 0)
        with host.stub("lane-1") as stub:
            assert next(iter(stub.Watch(pb.WatchRequest()))).counters.restores_refused == 1
