"""The command line itself: help, usage, exit codes, and the hand-over to the pack tools."""

import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from bench.__main__ import main as bench_commands
from coordinator.cli import COMMANDS, commands, main
from coordinator.cli.answer import Collected
from coordinator.cli.lane import progress_line
from coordinator.cli.progress import Progress
from coordinator.cli.sampling_options import fill, parse_bias, parse_ids
from coordinator.errors import BadOption, StartFailed
from coordinator.pack_facts import PackFacts
from laneproto.v1 import serve_pb2
from shared_experts.__main__ import commands as experts_commands
from tests.fakes.serving import cli


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name):
    shown = CliRunner().invoke(commands, [name, "--help"])
    assert shown.exit_code == 0
    found = commands.get_command(click.Context(commands), name)
    for words in [[name, part] for part in found.commands] if isinstance(found, click.Group) else [[name]]:
        assert "--json" in CliRunner().invoke(commands, [*words, "--help"]).output
    assert shown.output.startswith(f"Usage: commands {name}")


def test_the_group_lists_all_commands():
    shown = CliRunner().invoke(commands, ["--help"]).output
    assert [line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()] == list(COMMANDS)


def test_options_of_a_lane_are_not_for_a_server_that_runs():
    words = ["generate", "--address", "unix:/x", "--prompt", "x", "--context", "9"]
    assert "--context is for the lane of a PACK" in CliRunner().invoke(commands, words).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "x"],
        ["generate", "PACK", "--address", "127.0.0.1:1", "--prompt", "x"],
        ["generate", "PACK"],
        ["generate", "PACK", "--prompt", "x", "--prompt-ids", "1"],
        ["generate", "--address", "127.0.0.1:1", "--prompt-ids", "1", "--chat"],
        ["generate", "PACK", "--prompt", "x", "--tls"],
        ["generate", "--address", "127.0.0.1:1", "--prompt", "x", "--tls-ca", "/no/such/file"],
        ["generate", "--address", "127.0.0.1:1", "--prompt", "x", "--vram-budget", "1GiB"],
        ["generate", "--address", "127.0.0.1:1", "--prompt", "x", "--trace-routing", "."],
        ["generate", "PACK", "--prompt-ids", "1", "--chat"],
        ["generate", "PACK", "--prompt", "x", "--max-tokens", "0"],
        ["generate", "PACK", "--prompt", "x", "--temperature", "2.1"],
        ["generate", "PACK", "--prompt", "x", "--logprobs", "21"],
        ["generate", "PACK", "--prompt", "x", "--min-p", "1.1"],
        ["generate", "PACK", "--prompt", "x", "--repetition-penalty", "0"],
        ["generate", "PACK", "--prompt", "x", "--presence-penalty", "2.1"],
        ["generate", "PACK", "--prompt", "x", "--frequency-penalty", "-2.1"],
        ["generate", "PACK", "--prompt", "x", "--min-tokens", "-1"],
        ["serve", "PACK", "--lanes", "0"],
        ["serve", "PACK", "--launcher", "other"],
        ["serve", "PACK", "--trace-routing", "/no/such/folder"],
        ["serve", "PACK", "--ngram-cache", "many"],
        ["serve"],
        ["nothing"],
    ],
)
def test_wrong_usage(arguments):
    assert CliRunner().invoke(commands, arguments).exit_code == 2


def test_wrong_usage_and_refusals_through_the_real_entry(tmp_path):
    usage = cli("serve", "--nope")
    assert (usage.returncode, usage.stdout) == (2, "")
    assert usage.stderr.startswith("error: usage: No such option")
    env = {**os.environ, "XDG_RUNTIME_DIR": "/tmp/exw-nobody", "XDG_STATE_HOME": str(tmp_path)}
    refused = cli("status", "--cluster", "nobody", env=env)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: run_dir: ")
    unreachable = cli("generate", "--address", f"unix:{tmp_path}/none", "--prompt-ids", "1")
    assert (unreachable.returncode, unreachable.stdout) == (1, "")
    assert unreachable.stderr.startswith("error: unreachable: ")


@pytest.mark.parametrize(
    ("word", "hint"), [("stauts", "did you mean 'status'?"), ("zzz", "`expressway --help` lists them")]
)
def test_an_unknown_command_ends_with_a_hint(word, hint):
    assert f"there is no command '{word}'; {hint}" in CliRunner().invoke(commands, [word]).output


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "lane-2"),
        ({"state": "draining", "doing": "draining", "running": 2}, "lane-2: draining, 2 answers running"),
        ({"state": "draining", "doing": "stopping", "running": 1}, "lane-2: draining, stopping, 1 answer running"),
        ({"state": "ready", "doing": "done", "running": 0}, "lane-2: ready"),
    ],
)
def test_progress_of_a_lane_in_words(told, said):
    assert progress_line({"lane": "lane-2"} | told) == said


def test_a_lane_that_was_removed_is_called_that_and_not_by_its_last_state():
    told = {"lane": "lane-2", "state": "draining", "running": 0}
    assert progress_line(told | {"doing": "stopping"}, "removed") == "lane-2: draining, stopping"
    assert progress_line(told | {"doing": "done"}, "removed") == "lane-2: removed"


def test_help_loads_neither_torch_nor_ray():
    code = (
        "import sys; from coordinator.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: "
        "print(sorted({'torch', 'ray', 'numpy', 'shared_experts', 'lanes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_cluster_without_ray_needs_no_ray():
    """It is 100 MB, and nothing of the local launcher, the coordinator or its doors is to ask for it."""
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import coordinator.__main__, coordinator.cli.serve, coordinator.host.cluster, coordinator.frontdoor\n"
        "import coordinator.page.live, coordinator.launchers\n"
        "print(coordinator.launchers.open_launcher('local', None))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LocalLauncher" in done.stdout


def test_pack_inspect_and_verify_pass_output_and_exit_code_on(tmp_path):
    from bench.checkpoint import write_checkpoint
    from bench.tiny_model import PRESETS

    write_checkpoint(tmp_path / "source", PRESETS["tiny"])
    made = cli("pack", tmp_path / "source", tmp_path / "out", "--experts", "f32", "--dense", "f32", "--json")
    assert made.returncode == 0, made.stderr
    fingerprint = json.loads(made.stdout)["fingerprint"]
    seen = json.loads(cli("inspect", tmp_path / "out", "--json").stdout)
    assert (seen["fingerprint"], seen["experts"]["format"], seen["dense_dtype"]) == (fingerprint, "f32", "f32")
    assert cli("verify", tmp_path / "out").returncode == 0
    again = cli("pack", tmp_path / "source", tmp_path / "out")
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].startswith("error: output_exists: ")
    experts = tmp_path / "out" / "experts.bin"
    raw = bytearray(experts.read_bytes())
    raw[100] ^= 1
    experts.chmod(0o600)
    experts.write_bytes(raw)
    broken = cli("verify", tmp_path / "out")
    assert broken.returncode == 1
    assert "experts.bin" in broken.stderr
    assert cli("pack", tmp_path / "source", tmp_path / "other", "--experts", "q9").returncode == 2


@pytest.mark.parametrize(
    ("text", "ids"), [("1,2,3", [1, 2, 3]), (" 7 ", [7]), ("", []), ("0,4294967295", [0, 2**32 - 1])]
)
def test_token_ids(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["a", "1,,2", "1.5", "-1", "4294967296", "1 2"])
def test_token_ids_that_are_none(text):
    with pytest.raises(BadOption, match=r"numbers such as|from 0 to"):
        parse_ids(text)


@pytest.mark.parametrize(("text", "bias"), [("17=-2.5", (17, -2.5)), ("0=100", (0, 100.0)), (" 3 = 1e1 ", (3, 10.0))])
def test_biases(text, bias):
    assert parse_bias(text) == bias


@pytest.mark.parametrize("text", ["17", "17=", "=3", "a=1", "1=b", "1,2=3", "-1=3", "4294967296=1", "1=2=3"])
def test_biases_that_are_none(text):
    with pytest.raises(BadOption, match=r"17=-2\.5"):
        parse_bias(text)


SAMPLING = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.125, "seed": 2**64 - 1, "repetition_penalty": 1.5,
    "presence_penalty": -2.0, "frequency_penalty": 2.0, "min_tokens": 7,
}  # fmt: skip


def test_every_sampling_option_reaches_its_field(monkeypatch):
    seen = []

    async def ask(target, request, on_text, *, timeout_s, tls):
        seen.append(request)
        return Collected()

    monkeypatch.setattr("coordinator.cli.generate.ask", ask)
    monkeypatch.setattr("coordinator.cli.generate.configure_logging", lambda **_: None)  # of this whole process
    words = [word for name, value in SAMPLING.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--ignore-eos", "--stop", "a", "--stop-ids", "8,9"]
    ran = CliRunner().invoke(commands, ["generate", "--address", "unix:/x", "--prompt", "hi", "--json", *words])
    assert ran.exit_code == 0, ran.output
    (request,) = seen
    assert {name: getattr(request, name) for name in SAMPLING} == SAMPLING
    assert dict(request.logit_bias) == {5: -1.5, 6: 2.0}
    assert (request.ignore_eos, list(request.stop), list(request.stop_ids)) == (True, ["a"], [8, 9])


def test_what_is_not_given_is_not_sent():
    request = serve_pb2.GenerateRequest()
    fill(request, logit_biases=(), ignore_eos=False, stops=(), stop_ids=None, **dict.fromkeys(SAMPLING))
    assert request == serve_pb2.GenerateRequest()


def test_progress_off_a_terminal_is_a_line_for_each_change(capsys):
    progress = Progress()
    for states in ({"lane-10": "ready", "owner": "filling 3 %", "lane-2": "starting"},) * 3:
        progress.show(states)
    progress.end()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "owner filling 3 %, lane-2 starting, lane-10 ready\n"


def test_on_a_terminal_what_follows_the_progress_stands_on_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress()
    progress.show({"owner": "ready"})
    progress.end()
    progress.end()
    assert capsys.readouterr().err == "\r\x1b[Kowner ready\r\x1b[K"


def test_a_failed_start_ends_the_progress_first(monkeypatch, tmp_path, capsys):
    async def run_cluster(config, env, on_progress, on_ready):
        on_progress({"owner": "starting"})
        raise StartFailed("no")

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("coordinator.cli.serve.run_cluster", run_cluster)
    monkeypatch.setattr("coordinator.cli.serve.configure_logging", lambda **_: None)  # of this whole process
    monkeypatch.setattr("coordinator.cli.serve.read_facts", lambda _: PackFacts(None, None, 1))
    (tmp_path / "manifest.msgpack").touch()
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path)])
    assert capsys.readouterr().err == "\r\x1b[Kowner starting\r\x1b[Kerror: start_failed: no\n"


def _cut(group: click.Group, width: int = 80) -> list[str]:
    """Commands whose line in a group's help ends before its sentence does."""
    context = click.Context(group)
    names = group.list_commands(context)
    room, found = width - 2 - 6 - max(map(len, names)), []
    for name in names:
        child = group.get_command(context, name)
        line = child.get_short_help_str(room)
        if line.endswith("...") or len(line) > room:
            found.append(f"{name}: {line}")
        if isinstance(child, click.Group):
            found += _cut(child, width)
    return found


@pytest.mark.parametrize("group", [commands, experts_commands, bench_commands], ids=["expressway", "experts", "bench"])
def test_lists_of_commands_have_whole_sentences_in_a_narrow_terminal(group):
    assert _cut(group) == []
