"""The native expert kernel gives the bits of docs/expert-arithmetic.md, whatever computes it and however it is cut."""

import threading

import numpy as np
import pytest
import torch

from lanes.experts import reference
from lanes.experts.native import ISAS, ExpertKernel
from shared_experts.layout import EXPERT_FORMATS, F32, Q4G32, Q4G64, Q8, RecordLayout
from tests.fakes.expert_records import activations, addresses, bits, random_layout, records

BEST = ExpertKernel.best_isa()
HERE = [isa for isa in ISAS if ISAS[isa] <= ISAS[BEST]]
FORMATS = ["f32", "q4g64", "q4g32", "q8"]
QUANTISED = FORMATS[1:]


def spread(jobs: int, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs: some jobs empty, rows repeated and unordered."""
    counts = rng.integers(0, 10, jobs)
    counts[rng.integers(jobs)] += 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return offsets, rng.integers(0, rows, offsets[-1]).astype(np.int32)


def run(layout, recs, offsets, index, x, *, isa=BEST, threads=1):
    out = np.full((len(index), layout.hidden), 12345.0, np.float32)
    kernel = ExpertKernel(layout, threads=threads, isa=isa)
    kernel.run(addresses(recs), offsets, index, x, out)
    kernel.close()
    return out


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_scalar_is_the_written_arithmetic(name, hostile):
    rng = np.random.default_rng(11)
    for _ in range(15):
        layout = random_layout(rng, name, groups=11)
        recs = records(layout, 2, rng, hostile=hostile)
        x = activations(3, layout.hidden, rng, hostile=hostile)
        offsets, index = np.array([0, 2, 3], np.int32), np.array([1, 0, 2], np.int32)
        want = np.stack([reference.expert(layout, recs[j].tobytes(), x[r]) for j, r in ((0, 1), (0, 0), (1, 2))])
        got = run(layout, recs, offsets, index, x, isa="scalar")
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("name", "shapes", "groups"), [("f32", 200, 0), ("q4g64", 300, 16), ("q4g32", 400, 16), ("q8", 300, 11)]
)
def test_every_instruction_set_gives_the_same_bits_on_a_thousand_shapes(name, shapes, groups):
    rng = np.random.default_rng(100 + FORMATS.index(name))
    finite = 0
    for n in range(shapes):
        hostile = n % 2 == 1
        layout = random_layout(rng, name, groups=groups)
        recs = records(layout, 3, rng, hostile=hostile)
        x = activations(int(rng.integers(1, 10)), layout.hidden, rng, hostile=hostile)
        offsets, index = spread(3, len(x), rng)
        want = bits(run(layout, recs, offsets, index, x, isa="scalar"))
        finite += np.isfinite(want.view(np.float32)).sum() / want.size
        for isa in HERE[1:]:
            got = bits(run(layout, recs, offsets, index, x, isa=isa))
            np.testing.assert_array_equal(got, want, err_msg=f"{isa} {layout}")
    assert finite > shapes * 2 / 3  # the hostile cases do not drown everything in NaN


@pytest.mark.parametrize("name", QUANTISED)
def test_prompts_give_the_same_bits_on_every_instruction_set(name):
    rng = np.random.default_rng(200 + FORMATS.index(name))
    for n in range(30):
        hostile = n % 2 == 1
        layout = random_layout(rng, name, groups=(7, 17, 33)[n % 3])  # less than a block of 16 groups, one, several
        recs = records(layout, 2, rng, hostile=hostile)
        x = activations(int(rng.integers(7, 40)), layout.hidden, rng, hostile=hostile)
        offsets = np.array([0, rng.integers(0, 40), 40], np.int32)
        index = rng.integers(0, len(x), 40).astype(np.int32)
        want = bits(run(layout, recs, offsets, index, x, isa="scalar"))
        for isa in HERE[1:]:
            np.testing.assert_array_equal(bits(run(layout, recs, offsets, index, x, isa=isa)), want, err_msg=isa)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", FORMATS)
def test_threads_change_nothing(name, isa):
    rng = np.random.default_rng(5)
    layout = RecordLayout.of(EXPERT_FORMATS[name], 320, 192)
    recs = records(layout, 6, rng)
    x = activations(20, layout.hidden, rng)  # more than the caller quantises alone
    offsets, index = spread(6, len(x), rng)
    one = run(layout, recs, offsets, index, x, isa=isa)
    for threads in (2, 3):
        kernel = ExpertKernel(layout, threads=threads, isa=isa)
        for _ in range(30):
            out = np.zeros_like(one)
            kernel.run(addresses(recs), offsets, index, x, out)
            np.testing.assert_array_equal(bits(out), bits(one))
        kernel.close()


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", QUANTISED)
def test_the_smallest_scale_the_greatest_and_none(name, isa):
    rng = np.random.default_rng(13)
    group = EXPERT_FORMATS[name].group
    layout = RecordLayout.of(EXPERT_FORMATS[name], 2 * group, 2 * group)
    recs = records(layout, 1, rng)
    # Gate rows ignore the second group of x, which is huge: the product of gate and up keeps the first group visible.
    zero, row = (0, group) if name == "q8" else (0x88, group // 2)
    recs[0][: layout.intermediate * 2 * row].reshape(layout.intermediate, 2, row)[:, 1] = zero
    recs[0][layout.gate_up_scales :].view(np.float16)[:] = 100
    edge = np.float32(2.0**-100)
    x = np.zeros((8, layout.hidden), np.float32)
    x[:3, group:] = rng.standard_normal(group) * 1e30
    x[0, :group] = edge
    x[1, :group] = np.nextafter(edge, np.float32(0))
    x[2, :group:3] = -np.nextafter(edge, np.float32(1))
    x[3, 1] = np.finfo(np.float32).max
    x[4, 1] = np.finfo(np.float32).smallest_subnormal
    x[5, 1] = np.inf
    x[6, 1] = -np.nan
    got = run(layout, recs, np.array([0, 8], np.int32), np.arange(8, dtype=np.int32), x, isa=isa)
    want = np.stack([reference.expert(layout, recs[0].tobytes(), row) for row in x])
    np.testing.assert_array_equal(bits(got), bits(want))
    assert [bool(row.any()) for row in got[:3]] == [True, False, True]


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("code", [-128, -127, 127])
def test_the_greatest_8_bit_sums_are_exact(code, isa):
    layout = RecordLayout.of(Q8, 9 * 64, 64)  # a whole step and one group more
    recs = records(layout, 1, np.random.default_rng(15))
    recs[0][: layout.gate_up_scales].view(np.int8)[:] = code
    recs[0][layout.gate_up_scales :].view(np.float16)[:] = 2.0**-9
    x = np.full((20, layout.hidden), 127, np.float32)  # quantised to 127, scale 1
    x[1] = -127
    x[2, ::2] = -127
    x[3, ::3] = -127
    x[4, ::64] = 1
    got = run(layout, recs, np.array([0, 20], np.int32), np.arange(20, dtype=np.int32), x, isa=isa)
    want = np.stack([reference.expert(layout, recs[0].tobytes(), row) for row in x])
    np.testing.assert_array_equal(bits(got), bits(want))
    q, s = reference.quantise(x[0], 64)
    one = reference.dots_q8(recs[0][: layout.hidden].view(np.int8)[None], np.full((1, 9), 2.0**-9, np.float16), q, s)
    assert one[0] == 9 * 64 * code * 127 / 512


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", FORMATS)
def test_sums_start_at_positive_zero(name, isa):
    rng = np.random.default_rng(14)
    layout = random_layout(rng, name, groups=9)
    recs = records(layout, 1, rng)
    recs[0].view(np.uint16)[:] |= 0x8000  # every scale, or every weight, negative
    x = np.zeros((1, layout.hidden), np.float32)
    got = run(layout, recs, np.array([0, 1], np.int32), np.zeros(1, np.int32), x, isa=isa)
    assert not got.view(np.int32).any()


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", QUANTISED)
def test_rows_do_not_depend_on_their_company(name, isa):
    rng = np.random.default_rng(6)
    layout = RecordLayout.of(EXPERT_FORMATS[name], 192, 128)
    recs = records(layout, 1, rng)
    x = activations(34, layout.hidden, rng)
    alone = [run(layout, recs, np.array([0, 1], np.int32), np.array([r], np.int32), x, isa=isa)[0] for r in range(34)]
    for rows in (*range(1, 18), 32, 33, 34):  # one, a few or sixteen at once, and what is left of them
        together = run(layout, recs, np.array([0, rows], np.int32), np.arange(rows, dtype=np.int32), x, isa=isa)
        np.testing.assert_array_equal(bits(together), bits(np.stack(alone[:rows])))


@pytest.mark.parametrize("name", FORMATS)
def test_units_that_are_parts_of_blocks(name):
    """Few experts for many threads: blocks are cut, a last one that is not whole as well."""
    rng = np.random.default_rng(9)
    group = 32 if name == "q4g32" else 64
    for inner, jobs, rows in ((group, 1, 1), (640, 1, 1), (640 + group, 2, 20), (320, 3, 1)):
        layout = RecordLayout.of(EXPERT_FORMATS[name], 2 * group, inner)
        recs, x = records(layout, jobs, rng), activations(rows, layout.hidden, rng)
        offsets = np.arange(jobs + 1, dtype=np.int32) * rows
        index = np.tile(np.arange(rows, dtype=np.int32), jobs)
        want = bits(run(layout, recs, offsets, index, x, isa="scalar"))
        for threads in (2, 7, 16):
            np.testing.assert_array_equal(bits(run(layout, recs, offsets, index, x, threads=threads)), want)


@pytest.mark.parametrize("name", FORMATS)
def test_units_go_over_the_ends_of_jobs(name):
    """Rows of all jobs are cut together, with one pool for every call: what it holds of the last one is not taken."""
    rng = np.random.default_rng(13)
    group = 32 if name == "q4g32" else 64
    layout = RecordLayout.of(EXPERT_FORMATS[name], 5 * group, 3 * group)
    kernels = [ExpertKernel(layout, threads=threads) for threads in (3, 5, 13)]
    for jobs in range(1, 14):
        recs, x = records(layout, jobs, rng), activations(4, layout.hidden, rng)
        offsets, index = spread(jobs, 4, rng)
        want = bits(run(layout, recs, offsets, index, x, isa="scalar"))
        for kernel in kernels:
            out = np.full((len(index), layout.hidden), np.nan, np.float32)
            kernel.run(addresses(recs), offsets, index, x, out)
            np.testing.assert_array_equal(bits(out), want)
    for kernel in kernels:
        kernel.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_more_pairs_than_a_batch_holds(threads):
    rng = np.random.default_rng(7)
    layout = RecordLayout.of(Q4G32, 32, 32)
    recs = records(layout, 4, rng)
    x = activations(7, layout.hidden, rng)
    offsets = np.array([0, 3000, 3000, 12_345, 12_346], np.int32)  # one job fits a batch, one fills several
    index = rng.integers(0, 7, offsets[-1]).astype(np.int32)
    got = run(layout, recs, offsets, index, x, threads=threads)
    each = {(j, r): reference.expert(layout, recs[j].tobytes(), x[r]) for j in (0, 2, 3) for r in range(7)}
    job = np.repeat(np.arange(4), np.diff(offsets))
    want = np.stack([each[j, r] for j, r in zip(job.tolist(), index.tolist(), strict=True)])
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("isa", HERE)
def test_the_callers_float_mode_does_not_matter(isa):
    rng = np.random.default_rng(8)
    layout = RecordLayout.of(F32, 40, 24)
    recs = records(layout, 1, rng)
    weights = recs[0][: 12 * layout.hidden * layout.intermediate].view(np.float32)
    weights *= np.float32(1e38)
    x = activations(1, layout.hidden, rng) * np.float32(1e-39)
    offsets, index = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    want = run(layout, recs, offsets, index, x, isa=isa)
    assert np.isfinite(want).all()
    assert want.all()
    weights, y = np.full((1, 1), 0.5, np.float32), np.full((1, 40), 1e-40, np.float32)
    halved = np.zeros_like(y)
    kernel = ExpertKernel(layout, isa=isa)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        got = run(layout, recs, offsets, index, x, isa=isa)
        kernel.combine(np.zeros((1, 1), np.int32), weights, y, halved)
    finally:
        torch.set_flush_denormal(False)
    kernel.close()
    np.testing.assert_array_equal(bits(got), bits(want))
    np.testing.assert_array_equal(halved, y * np.float32(0.5))
    assert halved.any()


def test_callers_wait_for_each_other():
    rng = np.random.default_rng(9)
    layout = RecordLayout.of(Q4G64, 256, 128)
    recs = records(layout, 3, rng)
    x = activations(4, layout.hidden, rng)
    work = [spread(3, 4, np.random.default_rng(s)) for s in range(4)]
    want = [run(layout, recs, offsets, index, x) for offsets, index in work]
    kernel = ExpertKernel(layout, threads=3)
    got: list[list[np.ndarray]] = [[] for _ in work]

    def call(n: int) -> None:
        offsets, index = work[n]
        for _ in range(50):
            out = np.zeros((len(index), layout.hidden), np.float32)
            kernel.run(addresses(recs), offsets, index, x, out)
            got[n].append(out)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(len(work))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    kernel.close()
    for n, outs in enumerate(got):
        assert len(outs) == 50
        for out in outs:
            np.testing.assert_array_equal(bits(out), bits(want[n]))


@pytest.mark.parametrize("isa", HERE)
def test_combine_is_the_written_arithmetic(isa):
    rng = np.random.default_rng(10)
    for threads in (1, 2):
        for rows, chosen, hidden in ((1, 1, 1), (3, 10, 100), (40, 4, 33), (5, 2, 64)):
            layout = RecordLayout.of(F32, hidden, 1)
            y = activations(50, hidden, rng, hostile=rows == 40)
            index = rng.integers(0, 50, (rows, chosen)).astype(np.int32)
            weights = rng.random((rows, chosen), np.float32)
            out = np.full((rows, hidden), np.nan, np.float32)
            kernel = ExpertKernel(layout, threads=threads, isa=isa)
            kernel.combine(index, weights, y, out)
            kernel.close()
            want = np.stack([reference.combine(weights[r], y[index[r]]) for r in range(rows)])
            np.testing.assert_array_equal(bits(out), bits(want))


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", FORMATS)
def test_read_touches_every_weight_byte(name, isa):
    rng = np.random.default_rng(12)
    layout = RecordLayout.of(EXPERT_FORMATS[name], 128, 192)
    recs = records(layout, 3, rng)
    h, i, group = layout.hidden, layout.intermediate, layout.format.group
    code = layout.format.bits / 8
    parts = [(layout.gate_up_codes, int(2 * i * h * code)), (layout.down_codes, int(i * h * code))]
    if group:
        parts += [(layout.gate_up_scales, 4 * i * h // group), (layout.down_scales, 2 * h * i // group)]
    want = np.bitwise_xor.reduce([np.bitwise_xor.reduce(r[o : o + n].view(np.uint64)) for r in recs for o, n in parts])
    for threads in (1, 2):
        kernel = ExpertKernel(layout, threads=threads, isa=isa)
        assert kernel.read(addresses(recs)) == want
        kernel.close()
