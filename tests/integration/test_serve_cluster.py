"""`expressway serve` with real processes and a tiny pack: answers, deaths of each part, and an end without remains."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.serving import Served, cli, gone, tiny_pack, wait_for

IDS = ("--prompt-ids", "5,6,7,8", "--max-tokens", "8")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def metrics(ready):
    """Samples of `/metrics`, as it writes them."""
    with urllib.request.urlopen(f"http://{ready['page']}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.slow
def test_a_cluster_answers_survives_the_death_of_each_part_and_leaves_nothing(pack):
    with Served(pack, "--lanes", 2, "--vram-budget", "1MiB") as served:
        ready = served.ready
        assert ready["ready"] is True
        assert set(ready["pids"]) == {"supervisor", "owner", "lane-0", "lane-1", "coordinator"}
        assert ready["pids"]["supervisor"] == served.process.pid
        assert ready["run_dir"] == str(served.run_dir)
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in served.run_dir.iterdir()}
        assert {name for name, mode in modes.items() if mode != 0o600} == set(), modes

        with urllib.request.urlopen(f"http://{ready['http']}/healthz", timeout=60) as health:
            assert health.status == 200
        answer = served.generate(*IDS, "--logprobs", 2)
        assert metrics(ready)["expressway_generated_tokens_total"] == 8
        assert len(answer["token_ids"]) == len(answer["logprobs"]) == 8
        assert answer["logprobs"][0]["id"] == answer["token_ids"][0] == answer["logprobs"][0]["top"][0][0]
        usage = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 8}
        assert answer["usage"].items() >= usage.items()  # beside them, how many drafts there were
        assert (answer["finish_reason"], answer["lane"]["generated_tokens"]) == ("length", 8)
        assert answer["lane"]["expert_hits"] + answer["lane"]["expert_misses"] > 0

        second = cli("serve", pack, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--page", "off", env=served.env)
        assert second.returncode == 1
        assert "already running" in second.stderr

        others = {name: served.pids[name] for name in ("owner", "lane-1", "coordinator")}
        served.kill("lane-0")
        assert served.generate(*IDS)["token_ids"] == answer["token_ids"]
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"})
        lanes = {lane["lane"]: lane for lane in served.status()["lanes"]}
        assert (lanes["lane-0"]["restarts"], lanes["lane-1"]["restarts"]) == (1, 0)
        seen = metrics(ready)
        assert seen['expressway_lane_restarts_total{lane="lane-0"}'] == 1
        assert sum(seen[f'expressway_lane_generated_tokens_total{{lane="lane-{k}"}}'] for k in range(2)) == 16
        assert (seen["expressway_owner_up"], seen['expressway_region_state{state="ready"}']) == (1, 1)
        assert seen["expressway_region_bytes"] == seen["expressway_region_filled_bytes"] > 0
        assert {name: served.pids[name] for name in others} == others

        lanes_before = {name: served.pids[name] for name in ("lane-0", "lane-1")}
        # Read in other pieces, it has other last bits: a prompt after which three tokens lead by a tenth of scale.
        ids = [*range(5, 9), *(5 + 25 * k % 90 for k in range(296))]
        long = ("--prompt-ids", ",".join(map(str, ids)), "--max-tokens", "3")
        cold = served.generate(*long)
        served.kill("coordinator")
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"})
        assert {name: served.pids[name] for name in lanes_before} == lanes_before
        assert served.generate(*IDS)["token_ids"] == answer["token_ids"]
        warm = served.generate(*long)  # what lanes remember is found by a coordinator that never asked for it
        assert warm["token_ids"] == cold["token_ids"]
        assert warm["usage"]["cached_tokens"] > cold["usage"]["cached_tokens"] == 0

        served.kill("owner")
        wait_for(lambda: served.status()["owner"] == "ready")
        assert "source=adopted" in served.log("owner")
        assert {name: served.pids[name] for name in lanes_before} == lanes_before
        assert metrics(ready)["expressway_owner_restarts_total"] == 1

        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
        assert not served.run_dir.exists()
        assert {pid for pid in served.seen_pids if not gone(pid)} == set()


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_along_and_the_next_one_starts_over_its_remains(pack):
    with Served(pack, "--lanes", 2) as served:
        pids = served.pids
        os.kill(served.process.pid, signal.SIGKILL)
        served.wait()
        wait_for(lambda: all(gone(pid) for pid in pids.values()))
        assert (served.run_dir / "cluster.json").exists()
        again = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "serve", pack, "--ready-json", "--http", "127.0.0.1:0", "--page",
             "off", "--grpc", served.grpc],
            env=served.env, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert json.loads(again.stdout.readline())["ready"] is True
        finally:
            again.send_signal(signal.SIGINT)
            assert again.wait(60) == 0
            again.stdout.close()


@pytest.mark.slow
def test_a_stop_waits_for_running_answers_and_a_second_one_does_not(pack):
    with Served(pack, "--drain", 600) as served:
        address = ("--address", served.grpc, "--prompt-ids", "5,6", "--max-tokens", "30000", "--ignore-eos")
        asking = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "generate", *address], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=served.env,
        )  # fmt: skip
        wait_for(lambda: served.states() == {"lane-0": "busy"})
        pids = served.pids
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(2.0)
        assert asking.poll() is None
        served.process.send_signal(signal.SIGINT)
        served.wait()
        assert all(gone(pid) for pid in pids.values())
        assert not served.run_dir.exists()
        _, said = asking.communicate(timeout=60)
        assert asking.returncode == 1
        assert said.startswith("error: ")


def refused(served_env, pack, *options, exit_code=1):
    done = cli(
        "serve", pack, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--page", "off", *options, env=served_env
    )
    assert done.returncode == exit_code, done.stdout
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture
def env(tmp_path):
    with tempfile.TemporaryDirectory(prefix="exw-", dir="/tmp") as short:  # sockets lie in it
        yield {**os.environ, "XDG_RUNTIME_DIR": short, "XDG_STATE_HOME": f"{tmp_path}/state"}


def sockets(env):
    return list(Path(env["XDG_RUNTIME_DIR"]).rglob("*.sock"))


def files(env):
    """All but the empty folder where owners meet."""
    return [path for path in Path(env["XDG_RUNTIME_DIR"]).rglob("*") if path.name not in ("expressway", ".regions")]


def test_what_cannot_be_served_is_refused_before_anything_starts(pack, env, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen there" in refused(env, pack, "--grpc", port)
        assert "cannot listen there" in refused(env, pack, "--http", port)
    assert "no keys and no TLS" in refused(env, pack, "--http", "192.0.2.1:80", exit_code=2)
    assert "no such directory" in refused(env, tmp_path / "missing")
    assert "a size such as" in refused(env, pack, "--vram-budget", "much", exit_code=2)
    assert "cores" in refused(env, pack, "--cores-per-lane", 1000)
    assert "cluster name" in refused(env, pack, "--cluster", "../x", exit_code=2)
    assert sockets(env) == []


@pytest.mark.slow
def test_a_pack_that_is_broken_ends_the_start_with_the_owners_own_reason(pack, env, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(pack, broken)
    raw = bytearray((broken / "experts.bin").read_bytes())
    raw[5000] ^= 1
    (broken / "experts.bin").write_bytes(raw)
    reason = refused(env, broken)
    assert reason.startswith("error: start_failed: owner ended with code 1: bad_pack:"), reason
    assert "experts.bin" in reason
    assert sockets(env) == []


@pytest.mark.slow
def test_generate_with_a_pack_says_what_a_cluster_says_and_leaves_nothing(pack, env):
    first, second = cli("generate", pack, *IDS, "--json", env=env), cli("generate", pack, *IDS, env=env)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == json.loads(first.stdout)["text"] + "\n"
    assert files(env) == []
    asking = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "generate", pack, "--prompt-ids", "5", "--max-tokens", "30000",
         "--ignore-eos"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert asking.stdout.read(1)  # it answers
    asking.send_signal(signal.SIGTERM)
    asking.communicate(timeout=60)
    assert asking.returncode == 128 + signal.SIGTERM
    assert files(env) == []
    refusal = cli("generate", pack, "--prompt-ids", "1,100000", env=env)
    assert (refusal.returncode, refusal.stdout) == (1, "")
    assert refusal.stderr.splitlines()[-1].startswith("error: token_out_of_range: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("local", signal.SIGINT), ("local", signal.SIGTERM), ("ray", signal.SIGINT), ("ray", signal.SIGTERM)],
)
def test_a_signal_before_it_is_ready_is_told_and_leaves_nothing(pack, env, launcher, number):
    starting = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "serve", pack, "--json", "--http", "127.0.0.1:0", "--page", "off",
         "--grpc", "127.0.0.1:0", "--launcher", launcher], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    run_dir = Path(env["XDG_RUNTIME_DIR"]) / "expressway" / "default"
    mark = run_dir / ("ray.token" if launcher == "ray" else "supervisor.sock")  # Ray starts; processes start
    wait_for(lambda: mark.exists() or starting.poll() is not None)
    os.killpg(starting.pid, number)  # as a terminal does it
    said, told = starting.communicate(timeout=120)
    assert starting.returncode == 128 + number, told
    assert told.splitlines()[-1] == "error: interrupted: stopped before it was ready"
    assert "Traceback" not in told
    assert "never retrieved" not in told
    assert json.loads(said)["error"]["code"] == "interrupted"
    assert files(env) == []
