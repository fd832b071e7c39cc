"""Doctor: each check against a host that is well and one that is not."""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import commands, doctor_checks, doctor_gpu, doctor_host, gpu_probe
from coordinator.cli.doctor_checks import compiler, native_code, pack, port, run_directory
from coordinator.cli.doctor_gpu import gpu, judge
from coordinator.cli.doctor_host import (
    huge_pages,
    memlock,
    memory,
    open_files,
    pack_fits,
    state_disk,
    transparent_huge_pages,
)
from coordinator.cli.doctor_ray import command_lines, other_rays, ray_environment, ray_version
from coordinator.host.rundir import RunDir
from coordinator.sizing import PROCESS_BYTES
from tests.fakes.processes import tiny_pack

GIB = 1 << 30


def test_compiler(monkeypatch):
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert (compiler().state, compiler().found) == ("ok", "/bin/clang++")
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    assert compiler().state == "warn"
    assert "g++" in compiler().remedy


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ('{"kernel": {"isa": "avx512"}, "missing": []}', "ok"),
        ('{"kernel": {"isa": "scalar"}, "missing": []}', "warn"),
        ('{"kernel": {"error": "not built"}, "missing": []}', "fail"),
        ('{"kernel": {"isa": "avx512"}, "missing": ["librows was not built"]}', "fail"),
        ("", "fail"),
        ("[]", "fail"),
        ("{}", "fail"),
    ],
)
def test_native_code(monkeypatch, said, state):
    monkeypatch.setattr(
        doctor_checks.subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, stdout=said, stderr="")
    )
    assert native_code({}).state == state


def test_native_code_that_hangs(monkeypatch):
    def hang(argv, **_):
        raise subprocess.TimeoutExpired(argv, 1)

    monkeypatch.setattr(doctor_checks.subprocess, "run", hang)
    assert native_code({}).state == "fail"


def meminfo(available_bytes):
    return f"MemTotal: 9 kB\nMemAvailable:    {available_bytes >> 10} kB\n"


def test_memory():
    assert memory(meminfo(4 * GIB)).state == "ok"
    assert memory(meminfo(4 * GIB - 1024)).state == "warn"
    assert memory("").state == "warn"


def limits(locked="8388608", files="1024"):
    """As /proc/self/limits looks."""
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {locked:<20} unlimited            bytes     \n"
        f"Max open files            {files:<20} 1048576              files     \n"
    )


@pytest.mark.parametrize(("locked", "state"), [("unlimited", "ok"), (GIB, "ok"), (GIB - 1, "warn"), (0, "warn")])
def test_locked_memory(locked, state):
    found = memlock(limits(locked=str(locked)))
    assert found.state == state
    assert (found.remedy != "") == (state != "ok")


@pytest.mark.parametrize(("files", "state"), [("unlimited", "ok"), (1024, "ok"), (1023, "warn")])
def test_open_files(files, state):
    assert open_files(limits(files=str(files))).state == state


def test_limits_that_cannot_be_read_are_no_failure():
    assert [memlock("").state, open_files("nonsense\n").state] == ["warn", "warn"]
    assert memlock(Path("/proc/self/limits").read_text()).found != ""


def test_huge_pages():
    assert "4 KiB" in huge_pages(None).found
    assert "4 KiB" in huge_pages("0\n").found
    assert "2 GiB" in huge_pages("1024\n").found


def test_transparent_huge_pages():
    assert "advise" in transparent_huge_pages("always within_size [advise] never deny force\n").found
    assert "off" in transparent_huge_pages("always within_size advise [never] deny force\n").found
    assert transparent_huge_pages(None).state == "ok"


DESCRIBED = {
    "name": "m", "dense_dtype": "bf16", "experts": {"bytes": 10 * GIB, "format": "q4g64"},
    "sections": [{"name": "experts.0", "bytes": 10 * GIB}, {"name": "dense", "bytes": GIB}],
}  # fmt: skip
# a lane, as `serve` counts it: the dense weights as fp32, its process, its cache
ONE_LANE = 2 * GIB + PROCESS_BYTES + GIB // 2


def fits(available, *, lanes=1, pages=0, described=DESCRIBED):
    return pack_fits(described, meminfo(available), pages, lanes, GIB // 2)


def test_a_pack_is_compared_with_free_memory():
    needed = 10 * GIB + 2 * ONE_LANE
    assert fits(needed - 1024, lanes=2).state == "fail"
    assert "--lanes" in fits(needed - 1024, lanes=2).remedy
    assert fits(needed, lanes=2).state == "warn"  # nothing left for conversations
    assert fits(int(needed / 0.9) + 1024, lanes=2).state == "ok"
    assert fits(needed - 1024, lanes=1).state != "fail"
    assert pack_fits(DESCRIBED, "", 0, 1, 0).state == "warn"


def test_a_region_in_reserved_huge_pages_takes_no_other_memory():
    assert fits(2 * ONE_LANE, pages=5 * 1024).state == "ok"
    assert fits(2 * ONE_LANE, pages=5 * 1024 - 1).state == "fail"


def test_fp32_weights_are_not_doubled_and_a_cache_is_no_larger_than_the_experts():
    small = DESCRIBED | {"dense_dtype": "f32", "experts": {"bytes": 1 << 20}}
    assert fits(int((GIB + PROCESS_BYTES + (2 << 20)) / 0.9) + 1024, described=small).state == "ok"


def test_a_pack_is_looked_at_in_a_process_of_its_own(monkeypatch):
    def answers(code, out="", err=""):
        done = subprocess.CompletedProcess([], code, stdout=out, stderr=err)
        monkeypatch.setattr(doctor_checks.subprocess, "run", lambda argv, **_: done)

    answers(0, json.dumps(DESCRIBED))
    found, described = pack("p", {})
    assert (found.state, described) == ("ok", DESCRIBED)
    answers(1, err="noise\nerror: bad_pack: p: is no pack\n")
    found, described = pack("p", {})
    assert (found.state, found.found, described) == ("fail", "bad_pack: p: is no pack", None)


def test_a_broken_golden_record_is_found(tmp_path):
    folder = tiny_pack(tmp_path)
    assert pack(str(folder), dict(os.environ))[0].state == "ok"
    (folder / "golden.json").write_text("{}")
    found, described = pack(str(folder), dict(os.environ))
    assert (found.state, described) == ("fail", None)
    assert f"{folder / 'golden.json'}: " in found.found


def test_state_disk(monkeypatch, tmp_path):
    usage = doctor_host.shutil.disk_usage(tmp_path)
    for free, state in ((GIB, "ok"), (GIB - 1, "warn")):
        monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert state_disk(tmp_path / "not" / "there").state == state
    assert list(tmp_path.iterdir()) == []


def test_ray_environment():
    assert ray_environment({"PATH": "/bin"}).state == "ok"
    found = ray_environment({"RAY_ADDRESS": "x", "RAY_AUTH_TOKEN": "secret", "RAY_memory_monitor_refresh_ms": "250"})
    assert found.state == "warn"
    assert "RAY_ADDRESS" in found.found
    assert "RAY_memory_monitor_refresh_ms" in found.found
    assert "memory monitor" in found.remedy
    assert "secret" not in found.found + found.remedy


@pytest.mark.parametrize(
    ("version", "state"), [(None, "ok"), ("2.59.1", "ok"), ("2.59.0", "warn"), ("3.0.0rc1", "ok"), ("1.9", "warn")]
)
def test_ray_version(version, state):
    assert ray_version(version).state == state


def test_another_ray_on_this_host():
    ours = "/x/ray/core/src/ray/raylet/raylet --session=/tmp/exw-ray-abc/session"
    other = "/x/ray/core/src/ray/raylet/raylet --session=/tmp/ray/session"
    assert other_rays(["python -m raylet_tools", ours]).state == "ok"
    found = other_rays([ours, other])
    assert (found.state, found.found[0]) == ("warn", "1")
    assert "RAY_memory_monitor_refresh_ms=0" in found.remedy
    assert any("pytest" in line for line in command_lines())


H200 = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "host_register": 1, "read_only_host_register": 1}


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        ({"absent": "no CUDA driver"}, "ok", "lanes run on the CPU"),
        ({"driver": 12080, "devices": []}, "ok", "no GPU"),
        ({"error": "cuInit failed with code 999"}, "fail", "999"),
        ({"driver": 12080, "devices": [H200]}, "ok", "NVIDIA H200 (140 GiB), driver for CUDA 12.8; read-only"),
        ({"driver": 12080, "devices": [H200, H200 | {"read_only_host_register": 0}]}, "warn", "cannot be registered"),
        ({"driver": 12080, "devices": [{"name": "GPU 0", "error": "x"}]}, "warn", "cannot be registered"),
    ],
)
def test_gpu(found, state, said):
    assert judge(found).state == state
    assert said in judge(found).found


@pytest.mark.parametrize("answer", ["", "[]", "{}", "null", '{"devices": 1, "driver": 1}'])
def test_a_gpu_probe_that_breaks_off_is_a_failure(monkeypatch, answer):
    done = subprocess.CompletedProcess([], -11, stdout=answer, stderr="")
    monkeypatch.setattr(doctor_gpu.subprocess, "run", lambda argv, **_: done)
    assert gpu({}).state == "fail"


def test_a_driver_that_hangs_is_a_failure(monkeypatch):
    def hang(argv, **_):
        raise subprocess.TimeoutExpired(argv, 1)

    monkeypatch.setattr(doctor_gpu.subprocess, "run", hang)
    assert gpu({}).state == "fail"


def test_the_probe_itself_on_any_host(monkeypatch):
    assert {"absent", "error", "driver"} & set(gpu_probe.probe())
    monkeypatch.setattr(gpu_probe, "LIBRARY", "libno-such-driver.so.1")
    assert gpu_probe.probe() == {"absent": "no CUDA driver"}


def test_run_directory():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"XDG_RUNTIME_DIR": short, "HOME": short}
        assert run_directory("default", env).state == "ok"
        assert os.listdir(short) == []  # looking makes nothing
        (Path(short) / "expressway" / "default").mkdir(parents=True)
        (Path(short) / "expressway").chmod(0o755)
        assert "open to others" in run_directory("default", env).found
    assert run_directory("default", {**env, "XDG_RUNTIME_DIR": "/" + "x" * 100}).state == "fail"
    assert run_directory("../x", env).state == "fail"


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        assert (port("p", text, {}, asked=True).state, port("p", text, {}, asked=False).state) == ("fail", "warn")
    assert port("p", "127.0.0.1:0", {}, asked=True).state == "ok"
    assert port("p", "0.0.0.0:1", {}, asked=True).state == "fail"


@pytest.mark.parametrize("asked", [False, True])
def test_a_port_where_our_own_cluster_listens_is_a_warning_with_its_name(asked):
    with tempfile.TemporaryDirectory(prefix="exw-", dir="/tmp") as short, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"XDG_RUNTIME_DIR": short, "XDG_STATE_HOME": f"{short}/state"}
        ours = RunDir.claim("mine", env)
        ours.write_cluster({"http": text})
        found = port("p", text, env, asked=asked)
        ours.release()
        assert (found.state, found.found) == ("warn", f"{text}: cluster 'mine' listens there")


def test_looking_does_not_remove_a_stale_socket():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = Path(short) / "stale.sock"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
        assert port("p", f"unix:{path}", {}, asked=True).state == "ok"
        assert path.exists()


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, state, code):
    from coordinator.cli import doctor

    monkeypatch.setattr(doctor, "run_checks", lambda *_: [doctor_checks.Check("x", state, "found", "remedy")])
    done = CliRunner().invoke(commands, ["doctor", "--json"], standalone_mode=False)
    assert done.return_value == code
    assert json.loads(done.output) == {
        "ok": code == 0,
        "checks": [{"name": "x", "state": state, "found": "found", "remedy": "remedy"}],
    }
    assert "remedy" in CliRunner().invoke(commands, ["doctor"], standalone_mode=False).output


@pytest.mark.parametrize(("build", "state"), [("2.13.0+cpu", "warn"), ("2.11.0+cu130", "ok"), ("2.13.0", "ok")])
def test_a_gpu_and_a_torch_that_cannot_use_it(build, state):
    check = judge({"driver": 13000, "devices": [H200]}, build)
    assert check.state == state
    assert ("CPU build" in check.found) == (state == "warn")
