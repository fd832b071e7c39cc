"""`--trace-routing` on a real lane process: what is in the file is what the lane counted, and nothing else."""

import signal

from lanes.errors import EXIT_START
from lanes.experts.trace import read_trace
from shared_experts.pack import Pack
from tests.fakes.processes import Host, tiny_pack

PROMPT = [5, 9, 300, 11, 7, 401, 12, 3, 88, 6]


def test_a_lane_records_the_routing_of_every_window(tmp_path):
    pack = tiny_pack(tmp_path)
    path = tmp_path / "routing.trace"
    with Host(pack, tmp_path) as host:
        host.owner()
        lane = host.ready_lane("lane-0", "--trace-routing", str(path), "--prefill-chunk", "8")
        _, finished = host.ask(prompt_ids=PROMPT, max_tokens=5)
        refused = host.lane("lane-1", "--trace-routing", str(path))
        assert refused.wait() == EXIT_START
        assert "File exists" in refused.text()
        assert lane.kill(signal.SIGTERM) == 0
    counted = finished.counters
    with read_trace(path) as (header, found), Pack.open(pack) as opened:
        windows = list(found)
        info = opened.manifest.experts
        assert (header.layers, header.experts) == (info.layers, info.experts)
        assert header.fingerprint == opened.manifest.fingerprint
    assert [window.window_rows for window in windows] == [8, 2, 1, 1, 1, 1]
    assert counted.windows == len(windows)
    assert sum(int(window.rows.sum()) for window in windows) == counted.expert_hits + counted.expert_misses
    read = counted.expert_hit_bytes + counted.expert_miss_bytes
    assert sum(len(window.keys) for window in windows) * info.record_bytes == read
    assert path.stat().st_mode & 0o777 == 0o600
    # Nothing but routing: the size is that of the header and these windows.
    assert path.stat().st_size == 64 + sum(8 + 2 * info.layers + 4 * len(window.keys) for window in windows)
