"""A lane whose n-gram table breaks under it: the request hears a code, the log the place, and the process ends."""

import json
import os
import random
from pathlib import Path

import pytest

from laneproto.v1 import lane_pb2 as pb
from tests.fakes.processes import Host, tiny_pack

pytestmark = pytest.mark.slow


def test_a_table_that_ends_too_early(tmp_path):
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        host.owner()
        lane = host.ready_lane("lane-0", "--ngram-cache", "0", "--prefill-chunk", "64")
        prompt = random.Random(0).choices(range(2, 500), k=300)
        _, end = host.ask(prompt_ids=prompt, max_tokens=2)
        counters = end.counters
        assert end.reason == pb.FINISH_REASON_LENGTH
        assert counters.ngram_rows > counters.ngram_cache_hits
        assert counters.ngram_rows % (len(prompt) + 1) == 0, "as many for every row of a window"
        assert counters.ngram_read_bytes % 4096 == 0
        assert counters.ngram_read_bytes > 0

        table = Path(host.pack, "ngram.bin")
        os.truncate(table, 4096)
        ids, end = host.ask(prompt_ids=prompt[::-1], max_tokens=2)
        assert (ids, end.reason, end.error_code) == ([], pb.FINISH_REASON_ERROR, "table_read_failed")
        assert str(table) not in end.error_message
        assert lane.wait() == 70
        lines = [json.loads(line) for line in lane.text().splitlines() if line.startswith("{")]
        [opened] = [line for line in lines if line["event"] == "ngram_table"]
        assert opened["mode"] in ("direct", "buffered")
        [failed] = [line for line in lines if line["event"] == "ngram_read_failed"]
        assert (failed["file"], failed["layer"]) == (str(table), opened["layer"])
        assert "became shorter" in failed["reason"]
        assert failed["offset"] >= 4096

        again = host.lane()  # and none comes up on what is left
        assert again.wait() == 65
        assert "bad_pack" in again.text()
