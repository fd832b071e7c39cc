"""A lane over quantised packs answers as a model whose experts are the numpy reference, to the bit."""

import numpy as np
import pytest
import torch

from lanes.counters import Counters
from lanes.experts import reference
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.pack import Pack
from tests.fakes.processes import Host, tiny_pack

PROMPT = [5, 9, 300, 11, 7, 7, 401, 12]
TOKENS = 6


class Records:
    """The records of a pack's file, as a region lends them."""

    def __init__(self, pack):
        self.info = pack.manifest.experts
        self.bytes = np.fromfile(pack.experts_path, np.uint8)

    def record_address(self, layer, expert):
        return self.bytes.ctypes.data + (layer * self.info.experts + expert) * self.info.record_bytes


class ReferenceKernel:
    """A `lanes.experts.store.Kernel` that is the written arithmetic."""

    def __init__(self, records):
        self.records = records

    def run(self, addresses, row_offsets, row_index, x, out):
        size, base = self.records.info.record_bytes, self.records.bytes.ctypes.data
        for j, address in enumerate(addresses.tolist()):
            record = self.records.bytes[address - base :][:size].tobytes()
            for p in range(row_offsets[j], row_offsets[j + 1]):
                out[p] = reference.expert(self.records.info.layout, record, x[row_index[p]])

    def combine(self, pair_index, weights, y, out):
        for r, pairs in enumerate(pair_index):
            out[r] = reference.combine(weights[r], y[pairs])


def greedy(pack, kernel, records):
    """Logits and ids of a prompt in one window and then one token at a time."""
    torch.set_num_threads(1)
    counters = Counters()
    store = ExpertStore(kernel, ExpertCache(records, records.info, 0, adaptive, counters), counters)
    model = load_model(pack, store)
    pool = StatePool(model.state_shape, model.state_shape.bytes(64))
    slot = pool.open(64)
    logits = [model.forward(Window.of_sequence(PROMPT, 0, slot), pool)]
    ids = [int(logits[-1][-1].argmax())]
    while len(ids) < TOKENS:
        logits.append(model.forward(Window.of_sequence(ids[-1:], len(PROMPT) + len(ids) - 1, slot), pool))
        ids.append(int(logits[-1][-1].argmax()))
    return torch.cat(logits).numpy(), ids


@pytest.mark.parametrize("experts", ["q8", "q4g64", "q4g32"])
def test_a_lane_is_the_written_arithmetic(tmp_path, experts):
    path = tiny_pack(tmp_path, experts)
    with Pack.open(path) as pack:
        records = Records(pack)
        truth, ids = greedy(pack, ReferenceKernel(records), records)
        for isa in ("scalar", ExpertKernel.best_isa()):
            kernel = ExpertKernel(records.info.layout, isa=isa)
            np.testing.assert_array_equal(greedy(pack, kernel, records)[0], truth)
            kernel.close()
    with Host(path, tmp_path) as host:
        host.owner()
        lane = host.ready_lane("lane-0", EXPERT_ISA="scalar")
        assert '"isa": "scalar"' in lane.text()
        answered, _ = host.ask(prompt_ids=PROMPT, max_tokens=TOKENS)
    assert answered == ids
