"""The region itself: built byte for byte, immutable for everybody, refused by name whatever is wrong with it."""

import errno
import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from shared_experts import fill, host_memory, memfd
from shared_experts.errors import PackError, RegionError, RegionMismatch
from shared_experts.layout import REGION_HEADER_BYTES, REGION_LAYOUT_VERSION, REGION_STATE_OFFSET
from shared_experts.region import READY_WORD, RegionHeader, RegionShape, check_descriptor, start_ticks
from tests.fakes import regions

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


@pytest.fixture
def region(tmp_path):
    built = regions.build(tmp_path)
    yield built
    os.close(built.fd)


def page(**changes) -> bytes:
    header = RegionHeader.of(regions.shape(), bytes(range(16)), os.getpid())
    encoded = replace(header, **changes).encode()
    return (encoded + READY_WORD).ljust(REGION_HEADER_BYTES, b"\0")


def patched(offset: int, value: bytes, *, crc: bool = True) -> bytes:
    raw = bytearray(page())
    raw[offset : offset + len(value)] = value
    if crc:
        raw[120:124] = zlib.crc32(raw[:120]).to_bytes(4, "little")
    return bytes(raw)


def refusal(content: bytes, **forging) -> str:
    fd = regions.forged(content, **forging)
    try:
        with pytest.raises(RegionMismatch) as caught:
            check_descriptor(fd, regions.shape())
        return caught.value.check
    finally:
        os.close(fd)


def test_the_region_is_the_header_and_the_file(region):
    data = os.pread(region.fd, 1 << 20, 0)
    assert data[REGION_HEADER_BYTES:] == regions.records()
    assert data[REGION_STATE_OFFSET : REGION_STATE_OFFSET + 8] == READY_WORD
    assert data[REGION_STATE_OFFSET + 8 : REGION_HEADER_BYTES] == bytes(REGION_HEADER_BYTES - REGION_STATE_OFFSET - 8)
    header = check_descriptor(region.fd, regions.shape())
    assert header == region.header
    assert (header.owner_pid, header.owner_start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    fill.verify(region.fd, regions.shape(), threads=3, on_step=lambda *_: None)


def test_header_bytes_lie_where_the_map_says():
    raw = page(total_bytes=regions.shape().total_bytes)
    assert raw[:8] == b"XPWYREGN"
    assert struct.unpack_from("<IIQ", raw, 8) == (REGION_LAYOUT_VERSION, 4096, regions.shape().total_bytes)
    assert raw[24:40] == bytes(range(16))
    assert raw[40:72] == regions.shape().fingerprint
    assert struct.unpack_from("<II", raw, 88) == (regions.LAYERS, regions.EXPERTS)
    assert struct.unpack_from("<QIII", raw, 96) == (8192, 1, regions.HIDDEN, regions.INTERMEDIATE)


def test_two_builds_have_two_generations(tmp_path):
    first, second = regions.build(tmp_path), regions.build(tmp_path)
    assert first.header.generation != second.header.generation
    with pytest.raises(RegionMismatch) as caught:
        check_descriptor(first.fd, regions.shape(), generation=second.header.generation)
    assert caught.value.check == "generation"
    os.close(first.fd)
    os.close(second.fd)


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("chunk", [4096, 5000, 1 << 20])
def test_any_thread_count_and_chunk_gives_the_same_bytes(tmp_path, monkeypatch, threads, chunk):
    monkeypatch.setattr(fill, "CHUNK_BYTES", chunk)
    steps = []
    path = regions.write_experts(tmp_path / "experts.bin")
    built = fill.build(
        path, regions.shape(), threads=threads, on_step=lambda *step: steps.append(step), huge_pages=False
    )
    assert os.pread(built.fd, 1 << 20, REGION_HEADER_BYTES) == regions.records()
    os.close(built.fd)
    total = regions.shape().total_bytes
    filling = [done for step, done in steps if step == "filling"]
    assert filling == sorted(filling)
    assert filling[-1] == total - REGION_HEADER_BYTES
    assert steps[-4:] == [("data", total), ("header", total), ("ready", total), ("sealed", total)]


class TestImmutable:
    """Every way to change a byte or the size, from the descriptor that lanes get."""

    def test_descriptor_is_read_only_and_sealed(self, region):
        assert fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) & memfd.REQUIRED_SEALS == memfd.REQUIRED_SEALS

    def test_pwrite_and_truncate_are_refused(self, region):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(region.fd, b"x", 5000)
        for size in (0, 1 << 22):
            with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
                os.ftruncate(region.fd, size)

    def test_writable_map_is_refused_and_a_read_map_cannot_become_writable(self, region):
        with pytest.raises(PermissionError):
            mmap.mmap(region.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with mmap.mmap(region.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as read_map, pytest.raises(TypeError):
            read_map[0] = 0

    def test_reopening_for_writing_gives_nothing(self, region):
        before = os.pread(region.fd, 1 << 20, 0)
        try:
            writer = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            writer = None  # an ordinary user is stopped here by the file's mode, root by the seals below
        if writer is not None:
            for attempt in (
                lambda: os.pwrite(writer, b"x", 5000),
                lambda: os.ftruncate(writer, 0),
                lambda: os.ftruncate(writer, 1 << 22),
                lambda: os.posix_fallocate(writer, 0, 1 << 22),
                lambda: mmap.mmap(writer, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                lambda: punch_hole(writer, 4096, 4096),
                lambda: fcntl.fcntl(writer, fcntl.F_ADD_SEALS, 0x10),
            ):
                with pytest.raises(PermissionError):
                    attempt()
            os.close(writer)
        assert os.pread(region.fd, 1 << 20, 0) == before

    def test_holes_cannot_be_punched(self, region):
        with pytest.raises(OSError, match="Bad file descriptor"):
            punch_hole(region.fd, 4096, 4096)

    def test_no_name_and_no_other_descriptor_stays(self, tmp_path):
        before = regions.open_descriptors()
        built = regions.build(tmp_path)
        assert regions.open_descriptors() == before + 1
        assert os.fstat(built.fd).st_nlink == 0
        os.close(built.fd)
        assert "expressway-experts" not in Path("/proc/self/maps").read_text()


def punch_hole(fd: int, offset: int, length: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class TestRefused:
    """Each check by its name; the good forgery passes, so that every refusal is about its own field."""

    size = regions.shape().total_bytes

    def test_a_faithful_copy_passes(self):
        fd = regions.forged(page(), size=self.size)
        assert check_descriptor(fd, regions.shape()).generation == bytes(range(16))
        os.close(fd)

    @pytest.mark.parametrize("missing", ["WRITE", "SHRINK", "GROW", "SEAL"])
    def test_missing_seal(self, missing):
        seals = memfd.REQUIRED_SEALS & ~getattr(fcntl, f"F_SEAL_{missing}")
        assert refusal(page(), size=self.size, seals=seals) == "seals"

    def test_descriptor_open_for_writing(self):
        assert refusal(page(), size=self.size, writable=True) == "access_mode"

    def test_not_a_memory_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(page().ljust(self.size, b"\0"))
        for flags in (os.O_RDONLY, os.O_PATH):
            fd = os.open(path, flags)
            with pytest.raises(RegionMismatch) as caught:
                check_descriptor(fd, regions.shape())
            assert caught.value.check == "seals"
            os.close(fd)

    @pytest.mark.parametrize("size", [0, 1, 128, 135])
    def test_shorter_than_a_header(self, size):
        assert refusal(page()[:size], size=size) == "size"

    def test_one_page_more_or_less(self):
        assert refusal(page(), size=self.size - 4096) == "size"
        assert refusal(page(), size=self.size + 4096) == "size"
        assert refusal(page(total_bytes=self.size + 4096), size=self.size + 4096) == "size"

    def test_never_finished(self):
        assert refusal(page()[:128].ljust(4096, b"\0"), size=self.size) == "ready"
        assert refusal(bytes(4096), size=self.size) == "ready"

    def test_magic_version_reserved(self):
        assert refusal(patched(0, b"XPWYREGO"), size=self.size) == "magic"
        for offset, value in ((8, REGION_LAYOUT_VERSION + 1), (12, 8192)):
            assert refusal(patched(offset, value.to_bytes(4, "little")), size=self.size) == "layout_version"
        for offset in (76, 116):
            assert refusal(patched(offset, b"\1"), size=self.size) == "reserved"
        assert refusal(patched(124, b"\1"), size=self.size) == "reserved"

    def test_every_single_flipped_bit_before_the_checksum_is_seen(self):
        for bit in range(64, 120 * 8, 7):
            raw = bytearray(page())
            raw[bit // 8] ^= 1 << bit % 8
            assert refusal(bytes(raw), size=self.size) == "crc"
        assert refusal(patched(120, b"\0\0\0\0", crc=False), size=self.size) == "crc"

    def test_other_pack_and_other_shape(self):
        assert refusal(page(fingerprint=b"\7" * 32), size=self.size) == "fingerprint"
        for field in ("format_id", "hidden", "intermediate", "layers", "experts", "record_bytes"):
            assert refusal(page(**{field: getattr(regions.shape(), field) + 1}), size=self.size) == "shape"


class TestBuildFails:
    """A region that cannot be right is never returned, and its memory and descriptors are given back."""

    def refused(self, error, path, shape=None, **options):
        before = regions.open_descriptors()
        with pytest.raises(error) as caught:
            fill.build(path, shape or regions.shape(), threads=2, on_step=lambda *_: None, **options)
        assert regions.open_descriptors() == before
        assert "expressway-experts" not in Path("/proc/self/maps").read_text()
        return caught.value

    def test_one_flipped_bit(self, tmp_path):
        data = bytearray(regions.records())
        data[3 * len(data) // 4 + 11] ^= 4  # in the last layer
        path = tmp_path / "experts.bin"
        path.write_bytes(data)
        assert self.refused(PackError, path).section == "experts.3"

    def test_short_and_missing_file(self, tmp_path):
        path = tmp_path / "experts.bin"
        path.write_bytes(regions.records()[:-1])
        assert "the manifest says" in str(self.refused(PackError, path))
        assert "cannot be opened" in str(self.refused(PackError, tmp_path / "none"))

    def test_file_that_shrinks_meanwhile(self, tmp_path, monkeypatch):
        path = regions.write_experts(tmp_path / "experts.bin")
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: 0 if offset > 50_000 else real(fd, views, offset))
        assert "ends early" in str(self.refused(PackError, path))

    def test_not_enough_memory_by_one_byte(self, tmp_path, monkeypatch):
        path, total = regions.write_experts(tmp_path / "experts.bin"), regions.shape().total_bytes
        monkeypatch.setattr(host_memory, "floor_bytes", lambda: 1000)
        monkeypatch.setattr(host_memory, "available_bytes", lambda: total + 999)
        assert "must stay free" in str(self.refused(RegionError, path, huge_pages=False))
        monkeypatch.setattr(host_memory, "available_bytes", lambda: total + 1000)
        os.close(fill.build(path, regions.shape(), threads=1, on_step=lambda *_: None, huge_pages=False).fd)

    @pytest.mark.parametrize("name", ["memfd_create", "ftruncate", "posix_fallocate", "preadv"])
    def test_the_kernel_says_no(self, tmp_path, monkeypatch, name):
        path = regions.write_experts(tmp_path / "experts.bin")

        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, name, refuse)
        assert type(self.refused(RegionError, path, huge_pages=False)) is RegionError

    def test_a_writable_map_elsewhere_forbids_the_seal(self, tmp_path):
        path = regions.write_experts(tmp_path / "experts.bin")
        kept = []

        def keep(step, _):
            if step == "ready":
                fd = next(int(n) for n in os.listdir("/proc/self/fd") if is_region(n) and is_writable(int(n)))
                kept.append(mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))

        with pytest.raises(RegionError, match="cannot seal"):
            fill.build(path, regions.shape(), threads=1, on_step=keep, huge_pages=False)
        kept[0].close()

    def test_manifest_whose_layers_do_not_join_up(self):
        manifest = regions.manifest()
        first, second, *rest = manifest.sections
        for sections in ((first, *rest), (first, replace(second, offset=second.offset + 4096), *rest)):
            with pytest.raises(RegionError, match="layer 1"):
                RegionShape.of(replace(manifest, sections=sections))


def is_region(fd_name: str) -> bool:
    try:
        return "expressway-experts" in os.readlink(f"/proc/self/fd/{fd_name}")
    except OSError:
        return False


def is_writable(fd: int) -> bool:
    """Regions of other tests may still be open, but sealed ones are open for reading alone."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def test_verify_names_the_layer_that_differs():
    data = bytearray(page() + regions.records())
    data[-1] ^= 1
    fd = regions.forged(bytes(data))
    check_descriptor(fd, regions.shape())
    with pytest.raises(RegionMismatch, match="layer 3") as caught:
        fill.verify(fd, regions.shape(), threads=2, on_step=lambda *_: None)
    assert caught.value.check == "digest"
    os.close(fd)


def test_a_callback_can_stop_the_fill(tmp_path):
    path = regions.write_experts(tmp_path / "experts.bin")
    before = regions.open_descriptors()

    def stop(step, done_bytes):
        raise fill.Stopped

    with pytest.raises(fill.Stopped):
        fill.build(path, regions.shape(), threads=2, on_step=stop, huge_pages=False)
    assert regions.open_descriptors() == before


@pytest.mark.skipif(host_memory.free_huge_pages() < 1, reason="no free 2 MiB page on this host")
def test_huge_pages_hold_the_same_region(tmp_path):
    path = regions.write_experts(tmp_path / "experts.bin")
    built = fill.build(path, regions.shape(), threads=2, on_step=lambda *_: None)
    assert (built.page_bytes, os.fstat(built.fd).st_size) == (2 << 20, 2 << 20)
    assert check_descriptor(built.fd, regions.shape()) == built.header
    fill.verify(built.fd, regions.shape(), threads=2, on_step=lambda *_: None)
    with mmap.mmap(built.fd, 2 << 20, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[REGION_HEADER_BYTES : regions.shape().total_bytes] == regions.records()
    os.close(built.fd)


def test_meminfo_and_groups_are_read():
    assert host_memory.meminfo("MemTotal: 10 kB\nHugePages_Free: 3\nPss:  7 kB\n") == {"MemTotal": 10240, "Pss": 7168}
    assert host_memory.available_bytes() > 0
    assert 128 << 20 <= host_memory.floor_bytes() <= 1 << 30


def test_the_tightest_control_group_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP_ROOT", tmp_path)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 300000\nshmem 100000\n")
    monkeypatch.setattr(host_memory, "_own_group", lambda: tmp_path / "a" / "b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() == 800_000  # 1000000 - 400000 used + 200000 of page cache
