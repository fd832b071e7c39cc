"""`python -m shared_experts own` on a real small pack: its events, its limits, its exit codes, its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.checkpoint import PRESETS, write_checkpoint
from shared_experts import memfd, owner
from shared_experts.attach import attach
from shared_experts.damage import DamageRecord
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import PackError
from shared_experts.handoff import ask
from shared_experts.owner import Owner, OwnerConfig
from shared_experts.pack import Pack
from shared_experts.proof import Proof
from tests.fakes import regions


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    write_checkpoint(folder / "checkpoint", PRESETS["tiny"])
    command = [sys.executable, "-m", "shared_experts", "pack", folder / "checkpoint", folder / "pack"]
    subprocess.run([*command, "--experts", "q4g32"], cwd=regions.ROOT, check=True, capture_output=True)
    return folder / "pack"


def command(pack: Path, run: Path, *options: str) -> list[str]:
    own = [sys.executable, "-m", "shared_experts", "own"]
    return [*own, "--pack", str(pack), "--run-dir", str(run), "--log-json", *options]


@pytest.fixture
def own(pack, tmp_path):
    started = []

    def start(*options: str) -> subprocess.Popen:
        process = subprocess.Popen(command(pack, tmp_path / "run", *options), cwd=regions.ROOT, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def events(lines) -> list[dict]:
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def await_event(process: subprocess.Popen, name: str) -> dict:
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"ended without {name}")


def test_ready_event_status_and_what_the_process_holds(own, pack, tmp_path):
    process = own("--threads", "3")
    ready = await_event(process, "owner_ready")
    with Pack.open(pack) as opened, attach(tmp_path / "run" / "owner.sock", opened.manifest, 10.0) as region:
        assert ready["generation"] == region.generation.hex()
        assert (ready["source"], ready["adopted"], ready["threads"]) == ("built", False, 3)
        assert ready["bytes"] == region.header.total_bytes
        assert ready["seconds"] > 0
        assert ready["gb_per_s"] >= 0
        assert region.view[4096 : region.header.total_bytes] == opened.experts_path.read_bytes()
    status = regions.wait_ready(tmp_path / "run" / "owner.sock")
    assert (status.pid, status.done_bytes) == (process.pid, status.total_bytes)

    proc = Path("/proc") / str(process.pid)
    assert memfd.MEMFD_LABEL not in (proc / "maps").read_text()
    held = [fd for fd in (proc / "fd").iterdir() if memfd.MEMFD_LABEL in os.readlink(fd)]
    assert len(held) == 1
    flags = int((proc / "fdinfo" / held[0].name).read_text().split("flags:")[1].split()[0], 8)
    assert flags & os.O_ACCMODE == os.O_RDONLY
    core = next(line for line in (proc / "limits").read_text().splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    assert "Umask:\t0077" in (proc / "status").read_text()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "run").iterdir()} == {
        "owner.lock": 0o600, "owner.sock": 0o600,
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_with_nothing_left(own, tmp_path, number):
    process = own()
    await_event(process, "owner_ready")
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert {e["event"] for e in events(process.stderr)} - {"pack_proven"} == {"owner_stopped"}
    assert not (tmp_path / "run" / "owner.sock").exists()


def test_a_socket_elsewhere(own, pack, tmp_path):
    await_event(own("--socket", str(tmp_path / "other.sock")), "owner_ready")
    with Pack.open(pack) as opened:
        attach(tmp_path / "other.sock", opened.manifest, 10.0).close()


def flip(path: Path) -> None:
    """One bit, of a section."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", ["dense.safetensors", "ngram.bin"])
def test_a_successor_lends_nothing_when_the_pack_was_damaged_since(pack, tmp_path, damaged):
    mine, run = shutil.copytree(pack, tmp_path / "mine"), tmp_path / "run"
    with subprocess.Popen(command(mine, run), cwd=regions.ROOT, stderr=subprocess.PIPE) as first:
        await_event(first, "pack_proven")
        status, fd = ask(run / "owner.sock", "descriptor", timeout_s=60)
        first.terminate()
    flip(mine / damaged)
    with (
        DescriptorServer(run / "lane-0.region.sock", lambda: (status, fd)),
        subprocess.Popen(command(mine, run), cwd=regions.ROOT, stderr=subprocess.PIPE) as second,
    ):
        said = events(second.stderr)
        assert second.wait(60) == 1
        assert "owner_ready" not in [event["event"] for event in said]
        assert (said[-1]["event"], said[-1]["code"]) == ("owner_failed", "bad_pack")
        assert damaged in said[-1]["reason"]
    os.close(fd)


def test_what_is_proven_before_lanes_start_and_what_behind_them(pack, tmp_path):
    with Pack.open(pack) as opened:
        fingerprint = opened.fingerprint
        tables = sum(section.bytes for section in opened.manifest.sections if section.file == "ngram.bin")
    mine = shutil.copytree(pack, tmp_path / "mine")
    flip(mine / "ngram.bin")
    paused: list[float] = []

    with pytest.raises(PackError, match="ngram"):  # tables of the limit
        Proof(mine, fingerprint, tables).before(lambda: None)
    Proof(mine, fingerprint, tables).behind(paused.append)
    assert not paused  # nothing was left

    larger = Proof(mine, fingerprint, tables - 1)  # one byte over it
    larger.before(lambda: None)
    with pytest.raises(PackError, match="ngram"):
        larger.behind(paused.append)
    assert paused
    assert min(paused) > 0
    larger.before(lambda: None)  # nothing was kept

    keeps = Proof(mine, fingerprint, tables - 1, DamageRecord(tmp_path / "record", fingerprint))
    keeps.before(lambda: None)
    with pytest.raises(PackError, match="ngram"):
        keeps.behind(paused.append)
    with pytest.raises(PackError, match="found while lanes ran"):  # so its successors lend nothing
        keeps.before(lambda: None)
    flip(mine / "ngram.bin")
    keeps.before(lambda: None)
    keeps.behind(paused.append)

    flip(mine / "dense.safetensors")
    with pytest.raises(PackError, match="dense"):
        larger.before(lambda: None)
    with pytest.raises(PackError, match="another pack"):
        Proof(mine, b"x" * 32).before(lambda: None)


def test_what_is_found_behind_lanes_ends_the_owner(tmp_path):
    """It was ready, and says why it is no more."""
    (tmp_path / "run").mkdir(mode=0o700)
    ready = threading.Event()

    class Late:
        def before(self, check_stop: Callable[[], None]) -> None:
            check_stop()

        def behind(self, pause: Callable[[float], None]) -> None:
            while not ready.is_set():
                pause(0.01)
            raise PackError(tmp_path / "ngram.bin", "damaged", section="ngram.1")

    experts = regions.write_experts(tmp_path / "experts.bin")
    config = OwnerConfig(tmp_path / "run", experts, regions.shape(), threads=1, huge_pages=False, proof=Late())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(Owner(config).run)
        assert regions.wait_ready(tmp_path / "run" / "owner.sock").state == "ready"
        ready.set()
        with pytest.raises(PackError, match="ngram"):
            running.result(60)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["owner.lock"]


def test_a_second_owner_says_region_busy(own):
    await_event(own(), "owner_ready")
    second = own()
    assert second.wait(timeout=30) == 1
    output = second.stderr.read().splitlines()
    failed = events(output)[-1]
    assert (failed["event"], failed["code"], failed["retryable"]) == ("owner_failed", "region_busy", True)
    assert output[-1].startswith(b"error: region_busy: ")


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("experts.bin", "experts.bin: section 'experts."),
        ("dense.safetensors", "dense.safetensors: section 'dense'"),
        ("ngram.bin", "ngram.bin: section 'ngram."),
    ],
)
def test_a_flipped_bit_is_refused(pack, tmp_path, damaged, said):
    broken = shutil.copytree(pack, tmp_path / "broken")
    flip(broken / damaged)
    done = subprocess.run(command(broken, tmp_path / "run"), cwd=regions.ROOT, capture_output=True, timeout=60)
    assert done.returncode == 1
    failed = events(done.stderr.splitlines())[-1]
    assert (failed["code"], failed["retryable"]) == ("bad_pack", False)
    assert said in failed["reason"]
    assert not (tmp_path / "run" / "owner.sock").exists()


def test_it_follows_its_parent_only_when_told(pack, tmp_path):
    parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    started = {}
    for name, options in (("follows", ["--die-with-parent"]), ("stays", [])):
        run = tmp_path / name
        started[name] = subprocess.Popen(
            [sys.executable, "-c", parent, *command(pack, run, *options)],
            cwd=regions.ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    pids = {name: regions.wait_ready(tmp_path / name / "owner.sock").pid for name in started}
    for process in started.values():
        process.kill()
        process.communicate()
    deadline_s = time.monotonic() + 30
    while (tmp_path / "follows" / "owner.sock").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert regions.wait_ready(tmp_path / "stays" / "owner.sock").pid == pids["stays"]
    os.kill(pids["stays"], signal.SIGTERM)
    while (tmp_path / "stays" / "owner.sock").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("step", ["filling", "data", "header", "ready", "sealed"])
def test_stopped_at_any_step_of_the_fill_it_ends_cleanly(tmp_path, step):
    (tmp_path / "run").mkdir(mode=0o700)
    experts = regions.write_experts(tmp_path / "experts.bin")
    before = regions.open_descriptors()

    def on_step(at, _):
        if at == step:
            owner.stop()

    config = OwnerConfig(tmp_path / "run", experts, regions.shape(), threads=1, huge_pages=False)
    owner = Owner(config, on_step=on_step)
    owner.run()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["owner.lock"]
    assert regions.open_descriptors() == before


@dataclass(frozen=True)
class Only:
    """A proof of which all is before."""

    before: Callable[[Callable[[], None]], None]

    def behind(self, pause: Callable[[float], None]) -> None:
        raise AssertionError("it was never ready")


@pytest.mark.parametrize("when", ["at once", "during the fill", "after the fill"])
def test_what_else_is_damaged_ends_the_owner_and_frees_the_region(tmp_path, when):
    """Lanes read dense weights themselves: the owner proves them beside the fill and lends nothing before."""
    (tmp_path / "run").mkdir(mode=0o700)
    experts = regions.write_experts(tmp_path / "experts.bin")
    before, reached = regions.open_descriptors(), threading.Event()
    step = {"during the fill": "filling", "after the fill": "sealed"}.get(when)

    def prove(check_stop):
        while step and not reached.wait(0.01):
            check_stop()
        raise PackError(tmp_path / "dense.safetensors", "damaged", section="dense")

    config = OwnerConfig(tmp_path / "run", experts, regions.shape(), threads=1, huge_pages=False, proof=Only(prove))
    with pytest.raises(PackError, match="dense"):
        Owner(config, on_step=lambda at, _: reached.set() if at == step else None).run()
    assert regions.open_descriptors() == before


def test_a_pack_that_is_damaged_is_not_filled_to_its_end(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    experts = regions.write_experts(tmp_path / "experts.bin")
    seen: list[str] = []

    class AtOnce(ThreadPoolExecutor):
        def submit(self, *words):
            wait([(ended := super().submit(*words))])
            return ended

    def prove(check_stop):
        raise PackError(tmp_path / "ngram.bin", "found while lanes ran", section="ngram.1")

    monkeypatch.setattr(owner, "ThreadPoolExecutor", AtOnce)
    config = OwnerConfig(tmp_path / "run", experts, regions.shape(), threads=1, huge_pages=False, proof=Only(prove))
    with pytest.raises(PackError, match="while lanes ran"):
        Owner(config, on_step=lambda at, _: seen.append(at)).run()
    assert seen == []


def test_a_fill_that_fails_does_not_wait_for_the_other_proof(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    experts = regions.write_experts(tmp_path / "experts.bin")
    experts.write_bytes(bytes(experts.stat().st_size))

    def prove(check_stop):
        while True:
            check_stop()
            time.sleep(0.01)

    config = OwnerConfig(tmp_path / "run", experts, regions.shape(), threads=1, huge_pages=False, proof=Only(prove))
    with pytest.raises(PackError, match="SHA-256"):
        Owner(config).run()


def test_help_names_every_option():
    done = subprocess.run(
        [sys.executable, "-m", "shared_experts", "own", "--help"], cwd=regions.ROOT, capture_output=True
    )
    for option in (b"--pack", b"--run-dir", b"--socket", b"--threads", b"--log-json", b"--die-with-parent"):
        assert option in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "shared_experts", "own"], cwd=regions.ROOT, capture_output=True)
    assert wrong.returncode == 2
