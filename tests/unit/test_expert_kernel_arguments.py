"""What the native expert kernel refuses, and that it reads nothing outside what it was given."""

import ctypes
import dataclasses
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from lanes.errors import NativeKernelFailed, NativeKernelUnavailable
from lanes.experts import native
from lanes.experts.native import ISAS, ExpertKernel
from shared_experts.layout import F32, Q4G32, Q4G64, Q8, RecordLayout
from tests.fakes.expert_records import activations, addresses, records

LAYOUT = RecordLayout.of(Q4G64, 128, 64)
BEST = ExpertKernel.best_isa()


@pytest.fixture
def call():
    """A valid call whose parts a test can replace."""
    rng = np.random.default_rng(1)
    recs = records(LAYOUT, 2, rng)

    class Call:
        layout = LAYOUT
        at = addresses(recs)
        offsets = np.array([0, 1, 3], np.int32)
        index = np.array([0, 1, 0], np.int32)
        x = activations(2, 128, rng)
        out = np.zeros((3, 128), np.float32)
        alive = recs

        def run(self):
            kernel = ExpertKernel(self.layout)
            try:
                kernel.run(self.at, self.offsets, self.index, self.x, self.out)
            finally:
                kernel.close()

    made = Call()
    made.run()
    made.out[:] = 0
    return made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index", np.array([0, 2, 0], np.int32)),
        ("index", np.array([0, -1, 0], np.int32)),
        ("offsets", np.array([1, 1, 3], np.int32)),
        ("offsets", np.array([0, 4, 3], np.int32)),
        ("offsets", np.array([0, -1, 3], np.int32)),
    ],
)
def test_bad_indices_are_refused_before_anything_is_written(call, field, value):
    setattr(call, field, value)
    with pytest.raises(ValueError, match="out of bounds"):
        call.run()
    assert not call.out.any()


def test_a_null_or_crooked_address_is_refused(call):
    for address in (0, int(call.at[0]) + 2):
        call.at = np.array([address, call.at[1]], np.uint64)
        with pytest.raises(ValueError, match="out of bounds"):
            call.run()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 96}, {"intermediate": 96}, {"hidden": 0}, {"intermediate": -64}, {"hidden": 1 << 30},
        {"gate_up_codes": -64}, {"down_codes": 1 << 40}, {"gate_up_scales": 1}, {"record_bytes": 100},
        {"record_bytes": -1},
        {"down_scales": LAYOUT.record_bytes - 2 * 128 + 2},
        {"down_codes": LAYOUT.record_bytes - 128 * 32 + 1},
        {"gate_up_codes": LAYOUT.record_bytes - 128 * 64 + 1},
        {"gate_up_scales": LAYOUT.record_bytes - 4 * 64 * 2 + 2},
        {"format": Q8, "record_bytes": LAYOUT.record_bytes - 4},
        {"format": dataclasses.replace(Q8, id=5)}, {"format": dataclasses.replace(Q8, id=0)},
    ],
)  # fmt: skip
def test_a_layout_that_leaves_its_record_is_refused(call, change):
    call.layout = dataclasses.replace(LAYOUT, **change)
    call.x = np.zeros((2, max(call.layout.hidden, 1) % 1000), np.float32)
    call.out = np.zeros((3, call.x.shape[1]), np.float32)
    with pytest.raises(ValueError):  # noqa: PT011 - by shape or by the library
        call.run()
    kernel = ExpertKernel(call.layout)
    with pytest.raises(ValueError, match="out of bounds"):
        kernel.read(call.at)
    kernel.close()


def test_parts_may_end_with_the_record(call):
    for change in (
        {"down_scales": LAYOUT.record_bytes - 2 * 128},
        {"down_codes": LAYOUT.record_bytes - 128 * 32},
        {"gate_up_codes": LAYOUT.record_bytes - 128 * 64},
        {"gate_up_scales": LAYOUT.record_bytes - 4 * 64 * 2},
        {"format": Q8},  # twice the codes: either matrix then ends exactly with the record
    ):
        assert LAYOUT.record_bytes == 2 * 64 * 128 == LAYOUT.down_codes + 64 * 128
        call.layout = dataclasses.replace(LAYOUT, **change)
        call.run()


def test_wrong_arrays_are_refused_with_their_name(call):
    for field, value in (
        ("x", call.x.astype(np.float64)), ("x", call.x[:, ::-1]), ("x", call.x[:, :64]), ("out", call.out[:2]),
        ("offsets", call.offsets.astype(np.int64)), ("index", call.index.astype(np.int64)),
        ("at", call.at.view(np.int64)),
    ):  # fmt: skip
        before = getattr(call, field)
        setattr(call, field, value)
        with pytest.raises(ValueError, match="want contiguous"):
            call.run()
        setattr(call, field, before)
    call.offsets = np.array([0, 1, 2], np.int32)
    with pytest.raises(ValueError, match="row_offsets end at 2, there are 3 pairs"):
        call.run()


def test_nothing_to_do_is_fine(call):
    call.at, call.offsets = call.at[:0], np.zeros(1, np.int32)
    call.index, call.out = call.index[:0], call.out[:0]
    call.run()
    call.x = call.x[:0]
    call.run()


def test_combine_checks_its_indices():
    kernel = ExpertKernel(LAYOUT)
    y, weights, out = np.ones((3, 128), np.float32), np.ones((2, 2), np.float32), np.zeros((2, 128), np.float32)
    kernel.combine(np.array([[0, 2], [1, 1]], np.int32), weights, y, out)
    assert (out == 2).all()
    for bad in (3, -1):
        with pytest.raises(ValueError, match="out of bounds"):
            kernel.combine(np.array([[0, 2], [1, bad]], np.int32), weights, y, out)
    kernel.close()


def test_a_closed_kernel_says_so():
    kernel = ExpertKernel(LAYOUT, threads=2)
    kernel.close()
    kernel.close()
    with pytest.raises(ValueError, match="closed"):
        kernel.read(np.zeros(0, np.uint64))


def test_threads_and_cores():
    for threads in (0, 257):
        with pytest.raises(ValueError, match="out of bounds"):
            ExpertKernel(LAYOUT, threads=threads)
    for cores in ([], [0, -1], [0, 1024]):
        with pytest.raises(ValueError, match="out of bounds"):
            ExpertKernel(LAYOUT, cores=cores)
    with pytest.raises(ValueError, match="2 threads for 1 cores"):
        ExpertKernel(LAYOUT, cores=[0], threads=2)
    assert ExpertKernel(LAYOUT, cores=[0, 0], threads=2).threads == 2


def test_the_instruction_set_is_the_argument_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("EXPERT_ISA", "scalar")
    assert ExpertKernel(LAYOUT).isa == BEST
    assert ExpertKernel(LAYOUT, isa="scalar").isa == "scalar"
    for wrong in ("sse9", ""):
        with pytest.raises(ValueError, match=f"'{wrong}' is none of scalar, avx2, avx512"):
            ExpertKernel(LAYOUT, isa=wrong)


class Refusing:
    """The library of a CPU without AVX-512, or of a host without memory."""

    def __init__(self, code: int) -> None:
        self.code = code

    def expert_pool_create(self, *_: object) -> int:
        return self.code

    def expert_best_isa(self) -> int:
        return ISAS["avx2"]

    def expert_error_text(self, code: int) -> bytes:
        return native.native_library().expert_error_text(code) if self.code != 4 else b""


def test_an_instruction_set_this_cpu_lacks(monkeypatch):
    monkeypatch.setattr(native, "native_library", lambda: Refusing(4))
    with pytest.raises(NativeKernelUnavailable, match="cannot run avx512; its best is avx2"):
        ExpertKernel(LAYOUT, isa="avx512")


def test_no_compiler_no_kernel(monkeypatch):
    monkeypatch.setattr(native, "EXTENSION_SUFFIXES", [])
    with pytest.raises(NativeKernelUnavailable, match=r"install a C\+\+17 compiler"):
        ExpertKernel(LAYOUT)


def test_failures_of_the_host_are_not_the_callers_fault():
    kernel = ExpertKernel(LAYOUT)
    for code, text in ((2, "out of memory"), (3, "thread")):
        with pytest.raises(NativeKernelFailed, match=text):
            kernel._raise(code)


def test_the_library_checks_what_the_binding_cannot_get_wrong():
    library = native.native_library()
    pool = ctypes.c_void_p()
    assert library.expert_pool_create(0, None, 1, None) == 1
    assert library.expert_pool_create(4, None, 1, ctypes.byref(pool)) == 1
    assert library.expert_run(None, None, 0, None, None, None, 0, None, None) == 1
    assert library.expert_combine(None, 0, 1, 1, None, 0, None, None, None) == 1
    assert library.expert_read(None, None, 0, None, None) == 1
    assert library.expert_product(None, 1, 1, 1, None, None, None) == 1
    assert library.expert_pool_isa(None) == 0
    assert library.expert_pool_erase(None) == 0
    library.expert_pool_destroy(None)
    assert [bool(library.expert_error_text(c)) for c in range(6)] == [True] * 6


GUARDED = """
    import ctypes, dataclasses, mmap, sys
    import numpy as np
    from lanes.experts.native import ExpertKernel
    from shared_experts.layout import EXPERT_FORMATS, RecordLayout

    libc = ctypes.CDLL(None, use_errno=True)
    PAGE = 4096
    ROWS = 19  # sixteen at once and three more

    def guarded(data):
        # A copy of `data` whose last byte is the last before a page that nobody may read.
        pages = -(-len(data) // PAGE)
        memory = mmap.mmap(-1, (pages + 1) * PAGE)
        view = np.frombuffer(memory, np.uint8)
        if libc.mprotect(ctypes.c_void_p(view.ctypes.data + pages * PAGE), PAGE, 0):
            sys.exit("mprotect failed")
        inside = view[pages * PAGE - len(data) : pages * PAGE]
        inside[:] = data
        return inside

    rng = np.random.default_rng(0)
    for name, sizes in {SIZES}.items():
        for h, i in sizes:
            packed = RecordLayout.of(EXPERT_FORMATS[name], h, i)
            group, bits = packed.format.group, packed.format.bits
            parts = {{"gate_up_codes": 2 * i * h * bits // 8, "down_codes": i * h * bits // 8}}
            if group:
                parts |= {{"gate_up_scales": 4 * i * h // group, "down_scales": 2 * h * i // group}}
            for last in parts:  # each part once at the very end of the record
                offsets, end = {{"gate_up_scales": 0, "down_scales": 0}}, 0
                for part in sorted(parts, key=lambda p: p == last):
                    offsets[part], end = end, end + parts[part]
                padded = -(-end // 4) * 4
                offsets[last] += padded - end
                if offsets[last] % 4 and not group:
                    sys.exit("crooked test")
                layout = dataclasses.replace(packed, record_bytes=padded, **offsets)
                record = guarded(rng.integers(0, 60, padded).astype(np.uint8))
                x = guarded(rng.standard_normal((ROWS, h)).astype(np.float32).reshape(-1).view(np.uint8))
                out = guarded(np.zeros(4 * ROWS * h, np.uint8)).view(np.float32).reshape(ROWS, h)
                kernel = ExpertKernel(layout, isa="{ISA}")
                at, rows = np.array([record.ctypes.data], np.uint64), np.arange(ROWS, dtype=np.int32)
                kernel.run(at, np.array([0, ROWS], np.int32), rows, x.view(np.float32).reshape(ROWS, h), out)
                kernel.read(at)
                kernel.combine(np.zeros((ROWS, 1), np.int32), np.ones((ROWS, 1), np.float32), out.copy(), out)
                kernel.close()
    print("nothing read outside")
"""


@pytest.mark.parametrize("isa", [isa for isa in ISAS if ISAS[isa] <= ISAS[BEST]])
def test_nothing_is_read_behind_a_record(isa):
    sizes = {
        "q4g64": [(64, 64), (192, 320), (576, 704)],
        "q4g32": [(32, 32), (96, 160), (288, 352)],
        "q8": [(64, 64), (192, 320), (576, 704)],
        "f32": [(1, 1), (9, 7), (33, 17)],
    }
    script = textwrap.dedent(GUARDED).format(SIZES=sizes, ISA=isa)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing read outside"), done.stderr[-2000:]


def test_the_formats_are_those_of_the_layout():
    assert [f.id for f in (F32, Q4G64, Q4G32, Q8)] == [1, 2, 3, 4]
