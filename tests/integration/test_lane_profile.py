"""`--profiles` on real lane processes: what one lane used is what the next one begins with."""

import signal

from tests.fakes.processes import Host, tiny_pack

PROMPT = [5, 9, 300, 11, 7, 401, 12, 3, 88, 6]


def test_a_lane_begins_with_what_an_earlier_one_used(tmp_path):
    folder = tmp_path / "profiles"
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        host.owner()

        def life(name):
            lane = host.ready_lane(name, "--profiles", str(folder))
            tokens, finished = host.ask(name, prompt_ids=PROMPT, max_tokens=12)
            assert lane.kill(signal.SIGTERM) == 0
            return tokens, finished.counters

        told, first = life("lane-0")
        (file,) = folder.iterdir()
        again, second = life("lane-1")
        assert len(list(folder.iterdir())) == 2
        file.write_bytes(b"nothing of the kind")
        assert life("lane-2")[0] == told  # refused, and no reason not to start
    assert again == told
    assert second.expert_hits > first.expert_hits
