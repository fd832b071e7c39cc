"""Several clusters of one user: which run, who listens where, and dead ones' directories."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

from coordinator.cli import commands
from coordinator.config import Address
from coordinator.errors import BadAddress, RunDirError
from coordinator.host.cluster import free_address
from coordinator.host.clusters import clear_stale, running_clusters, the_cluster, who_listens
from coordinator.host.rundir import RunDir, is_running, read_cluster, regions_path, run_path


@pytest.fixture(params=["runtime", "state"])
def env(request, tmp_path):
    """With a runtime directory, and without one: then run directories lie in the state directory."""
    with tempfile.TemporaryDirectory(prefix="exw-", dir="/tmp") as short:
        if request.param == "runtime":
            yield {"XDG_RUNTIME_DIR": short, "XDG_STATE_HOME": str(tmp_path / "state")}
        else:
            yield {"XDG_STATE_HOME": short}


@pytest.fixture
def claim(env):
    held = []

    def claim(name, **content):
        run_dir = RunDir.claim(name, env)
        held.append(run_dir)
        if content:
            run_dir.write_cluster(content)
        return run_dir

    yield claim
    for run_dir in held:
        run_dir.release()


def dies(env, name):
    """A supervisor that is killed."""
    code = "import os, sys; from coordinator.host.rundir import RunDir; " \
        "d = RunDir.claim(sys.argv[1], dict(os.environ)); " \
        "d.write_cluster({'ready': True, 'http': '127.0.0.1:1'}); os.kill(os.getpid(), 9)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code, name], env={"PATH": os.environ["PATH"], **env}, check=False)
    assert (run_path(name, env) / "cluster.json").exists()


def test_a_cluster_that_was_killed_is_not_asked(env):
    dies(env, "a")
    with pytest.raises(RunDirError, match="'a' does not run here any more"):
        read_cluster("a", env)


def test_a_cluster_runs_while_its_supervisor_holds_the_lock(env, claim):
    assert not is_running("a", env)
    assert running_clusters(env) == []
    first = claim("b", ready=True, http="127.0.0.1:5")
    claim("a")
    dies(env, "dead")
    assert [(each.name, each.content.get("http")) for each in running_clusters(env)] == [
        ("a", None),
        ("b", "127.0.0.1:5"),
    ]
    assert first.path == run_path("b", env)
    assert not is_running("dead", env)


def test_unnamed_the_cluster_is_the_only_one_that_runs(env, claim):
    with pytest.raises(RunDirError, match="no cluster runs here"):
        the_cluster(None, env)
    dies(env, "dead")
    claim("b")
    assert the_cluster(None, env) == "b"
    claim("a")
    with pytest.raises(RunDirError, match=r"several clusters run here \(a, b\)"):
        the_cluster(None, env)
    assert the_cluster("c", env) == "c"  # named: whether it runs is seen later


def test_a_claim_gets_past_somebody_who_only_looks(env):
    path = run_path("a", env)
    path.mkdir(parents=True, mode=0o700)
    for each in (path, *path.parents[: list(path.parents).index(regions_path(env).parent) + 1]):
        each.chmod(0o700)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    closer = subprocess.Popen(["sleep", "0.1"], pass_fds=[fd])  # holds the same lock until it ends
    os.close(fd)
    RunDir.claim("a", env).release()
    closer.wait()


def test_only_what_dead_clusters_left_is_cleared(env, claim):
    living = claim("living", ready=True)
    dies(env, "dead")
    regions_path(env).mkdir(mode=0o700)
    (regions_path(env) / "something").touch()
    (regions_path(env).parent / "No cluster").mkdir()
    assert clear_stale(env) == ["dead"]
    assert not run_path("dead", env).exists()
    assert (living.path / "cluster.json").exists()
    assert (regions_path(env) / "something").exists()
    assert (regions_path(env).parent / "No cluster").exists()
    assert clear_stale(env) == []


def test_a_directory_that_is_not_safe_is_left_alone(env):
    dies(env, "open")
    run_path("open", env).chmod(0o755)
    assert clear_stale(env) == []
    assert (run_path("open", env) / "cluster.json").exists()
    run_path("open", env).chmod(0o700)


def test_who_holds_a_port_is_said_when_it_is_ours(env, claim):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(BadAddress, match=r"cannot listen there: Address already in use$"):
            free_address(address, env)
        claim("mine", ready=True, page=str(address))
        assert who_listens(str(address), env) == "mine"
        with pytest.raises(BadAddress, match="cluster 'mine' listens there"):
            free_address(address, env)
    assert free_address(address, env) == address
    assert who_listens("127.0.0.1:1", env) is None


def status(env, *options):
    return CliRunner().invoke(commands, ["status", *options], env={"XDG_RUNTIME_DIR": "", **env})


def test_status_without_a_name_lists_several_and_says_when_there_is_none(env, claim):
    assert "no cluster runs here" in str(status(env).exception)
    claim("a", ready=True, model="m", http="127.0.0.1:5", grpc="unix:/x")
    claim("b", ready=False, http="127.0.0.1:6", model=None)
    listed = json.loads(status(env, "--json").stdout)
    assert [(each["cluster"], each["ready"], each["http"]) for each in listed["clusters"]] == [
        ("a", True, "127.0.0.1:5"),
        ("b", False, "127.0.0.1:6"),
    ]
    shown = status(env).stdout
    assert "127.0.0.1:5" in shown
    assert "(starting)" in shown
    assert "not ready yet" in str(status(env, "--cluster", "b").exception)
