"""The run directory: ours alone, one holder at a time, empty when released, and hostile surroundings refused."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest

from coordinator.errors import RunDirBusy, RunDirError
from coordinator.host.rundir import (
    SOCKET_PATH_LIMIT_BYTES,
    RunDir,
    check_socket_path,
    read_cluster,
    run_path,
    state_dir,
)


@pytest.fixture
def env(tmp_path):
    with tempfile.TemporaryDirectory(prefix="exw-", dir="/tmp") as short:  # pytest's own paths are too long for sockets
        yield {"XDG_RUNTIME_DIR": short, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_claim_makes_private_directories_and_release_leaves_nothing(env):
    run_dir = RunDir.claim("default", env)
    assert run_dir.path == run_path("default", env)
    assert {mode(run_dir.path), mode(run_dir.path.parent), mode(run_dir.log_dir)} == {0o700}
    run_dir.write_cluster({"http": "x"})
    assert mode(run_dir.path / "cluster.json") == 0o600
    assert read_cluster("default", env) == {"http": "x"}
    run_dir.release()
    assert not run_dir.path.exists()
    assert run_dir.log_dir.is_dir()  # logs survive
    with pytest.raises(RunDirError, match="does not run here"):
        read_cluster("default", env)


def test_without_a_runtime_directory_the_state_directory_serves(env):
    for value in ("", "relative/path"):
        found = run_path("default", {**env, "XDG_RUNTIME_DIR": value})
        assert found == state_dir("default", env) / "run"
    assert state_dir("default", {"HOME": "/h"}).as_posix() == "/h/.local/state/expressway/default"


def test_one_holder_at_a_time(env):
    first = RunDir.claim("default", env)
    with pytest.raises(RunDirBusy, match="already running"):
        RunDir.claim("default", env)
    RunDir.claim("other", env).release()
    first.release()
    RunDir.claim("default", env).release()


def test_what_a_killed_holder_left_is_cleared(env, tmp_path):
    code = "import os, sys; from coordinator.host.rundir import RunDir; " \
        "d = RunDir.claim('default', dict(os.environ)); " \
        "(d.path / 'owner.sock').touch(); (d.path / 'deep').mkdir(); (d.path / 'deep' / 'file').touch(); " \
        "(d.path / 'link').symlink_to(sys.argv[1]); os.kill(os.getpid(), 9)"  # fmt: skip
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "kept").touch()
    subprocess.run([sys.executable, "-c", code, str(treasure)], env={**os.environ, **env}, check=False)
    assert (run_path("default", env) / "owner.sock").exists()
    run_dir = RunDir.claim("default", env)
    assert os.listdir(run_dir.path) == ["lock"]
    assert (treasure / "kept").exists()  # links are removed, never followed
    run_dir.release()


@pytest.mark.parametrize("bits", [0o010, 0o001, 0o004, 0o040])
def test_a_directory_open_to_others_is_refused(env, bits):
    path = run_path("default", env)
    path.parent.mkdir(mode=0o700)
    path.mkdir()
    path.chmod(0o700 | bits)
    with pytest.raises(RunDirError, match="open to others"):
        RunDir.claim("default", env)


def test_a_link_or_a_file_in_its_place_is_refused(env, tmp_path):
    path = run_path("default", env)
    path.parent.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="not a directory"):
        RunDir.claim("default", env)
    path.unlink()
    path.touch()
    with pytest.raises(RunDirError, match="not a directory"):
        RunDir.claim("default", env)


def test_socket_paths_at_the_limit_and_one_past_it(tmp_path):
    from pathlib import Path

    fits = Path("/" + "x" * (SOCKET_PATH_LIMIT_BYTES - 1))
    assert check_socket_path(fits) == fits
    with pytest.raises(RunDirError, match="108 bytes"):
        check_socket_path(Path("/" + "x" * SOCKET_PATH_LIMIT_BYTES))
    with pytest.raises(RunDirError, match="XDG_RUNTIME_DIR"):
        RunDir.claim("default", {"XDG_RUNTIME_DIR": str(tmp_path / ("d" * 90)), "HOME": str(tmp_path)})


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "A", "a" * 33, "a\n", "ä"])
def test_cluster_names_that_could_be_paths_are_refused(env, name):
    with pytest.raises(RunDirError, match="cluster name"):
        RunDir.claim(name, env)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", json.dumps({"a": "x" * (1 << 20)}).encode()],
    ids=["empty", "list", "cut", "binary", "long"],
)
def test_a_cluster_file_that_is_not_one_is_refused(env, content):
    run_dir = RunDir.claim("default", env)
    (run_dir.path / "cluster.json").write_bytes(content)
    (run_dir.path / "cluster.json").chmod(0o600)
    with pytest.raises(RunDirError):
        read_cluster("default", env)
    run_dir.release()


def test_a_cluster_file_open_to_others_or_a_link_is_refused(env, tmp_path):
    run_dir = RunDir.claim("default", env)
    run_dir.write_cluster({})
    (run_dir.path / "cluster.json").chmod(0o644)
    with pytest.raises(RunDirError, match="open to others"):
        read_cluster("default", env)
    (run_dir.path / "cluster.json").unlink()
    (tmp_path / "real").write_text("{}")
    (run_dir.path / "cluster.json").symlink_to(tmp_path / "real")
    with pytest.raises(RunDirError):
        read_cluster("default", env)
    run_dir.release()


def test_a_temporary_directory_too_deep_for_sockets_is_refused_and_not_left(env, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with pytest.raises(RunDirError, match="at most 107"):
        RunDir.temporary({**env, "XDG_RUNTIME_DIR": str(deep)})
    assert list(deep.iterdir()) == []


def test_temporary_directories_are_private_and_vanish(env):
    run_dir = RunDir.temporary(env)
    assert mode(run_dir.path) == 0o700
    assert run_dir.path.parent.as_posix() == env["XDG_RUNTIME_DIR"]
    run_dir.log("lane-0").touch()
    run_dir.release()
    assert not run_dir.path.exists()


def test_a_cluster_file_that_cannot_be_written_is_named(env):
    run_dir = RunDir.claim("default", env)
    (run_dir.path / "cluster.json").mkdir()
    with pytest.raises(RunDirError, match=r"cluster\.json cannot be written"):
        run_dir.write_cluster({})
    (run_dir.path / "cluster.json").rmdir()
    run_dir.release()


def test_a_directory_that_was_removed_is_no_failure_at_the_end(env):
    run_dir = RunDir.claim("default", env)
    shutil.rmtree(run_dir.path)
    with pytest.raises(RunDirError, match=r"cluster\.json cannot be written"):
        run_dir.write_cluster({})
    run_dir.release()


def test_release_leaves_a_directory_alone_that_somebody_else_holds_by_now(env):
    first = RunDir.claim("default", env)
    shutil.rmtree(first.path)
    second = RunDir.claim("default", env)
    second.write_cluster({"of": "second"})
    first.release()
    assert read_cluster("default", env) == {"of": "second"}
    second.release()
    assert not second.path.exists()
