"""Doctor: each check against a host that is well and one that is not."""

import json
import os
import resource
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import commands, doctor_checks
from coordinator.cli.doctor_checks import (
    compiler,
    huge_pages,
    memlock,
    memory,
    native_code,
    port,
    ray_environment,
    run_directory,
)


def test_compiler(monkeypatch):
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    assert (compiler().state, compiler().found) == ("ok", "/bin/clang++")
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    assert compiler().state == "warn"
    assert "g++" in compiler().remedy


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ('{"kernel": {"isa": "avx512"}}', "ok"),
        ('{"kernel": {"isa": "scalar"}}', "warn"),
        ('{"kernel": {"error": "not built"}}', "fail"),
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


def test_memory_and_locked_memory():
    assert memory("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n").state == "ok"
    assert memory("MemTotal: 9 kB\nMemAvailable:    4194303 kB\n").state == "warn"
    assert memory("").state == "warn"
    assert [memlock(limit).state for limit in (resource.RLIM_INFINITY, 1 << 30, (1 << 30) - 1)] == ["ok", "ok", "warn"]


def test_huge_pages(tmp_path):
    assert "4 KiB" in huge_pages(tmp_path / "none").found
    (tmp_path / "free_hugepages").write_text("1024\n")
    assert "2.0 GiB" in huge_pages(tmp_path).found


def test_ray_environment():
    assert ray_environment({"PATH": "/bin"}).state == "ok"
    found = ray_environment({"RAY_ADDRESS": "x", "RAY_AUTH_TOKEN": "secret"})
    assert found.state == "warn"
    assert "RAY_ADDRESS" in found.found
    assert "secret" not in found.found


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
        assert (port("p", text, asked=True).state, port("p", text, asked=False).state) == ("fail", "warn")
    assert port("p", "127.0.0.1:0", asked=True).state == "ok"
    assert port("p", "0.0.0.0:1", asked=True).state == "fail"


def test_looking_does_not_remove_a_stale_socket():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = Path(short) / "stale.sock"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
        assert port("p", f"unix:{path}", asked=True).state == "ok"
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
