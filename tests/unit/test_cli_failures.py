"""How all commands fail: wrong usage is 2, a refusal 1, and each is one line, with `--json` an object, too."""

import json
import signal

import pytest

from coordinator.cli import COMMANDS, main
from coordinator.cli.failure import fail, wants_json
from coordinator.cli.pack import EXPERT_FORMATS
from coordinator.errors import Interrupted, StartFailed
from shared_experts.layout import EXPERT_FORMATS as WRITTEN_FORMATS
from tests.fakes.serving import cli

PROMPT = ("--prompt", "x")

USAGE = [
    ["nothing"],
    ["pack"],
    ["pack", "SRC"],
    ["pack", "SRC", "OUT", "MORE"],
    ["pack", "SRC", "OUT", "--experts", "nope"],
    ["pack", "SRC", "OUT", "--dense", "nope"],
    ["inspect"],
    ["inspect", "PACK", "--nope"],
    ["verify"],
    ["verify", "PACK", "MORE"],
    ["lane", "drain"],
    ["cluster", "nothing"],
    ["cluster", "init", "MORE"],
    ["cluster", "invite"],
    ["cluster", "revoke"],
    ["cluster", "join", "PACK", "--listen", "127.0.0.1:0"],
    ["cluster", "join", "PACK", "--head", "127.0.0.1:1", "--listen", "unix:/tmp/s"],
    ["keys", "add"],
    ["top", "--nope"],
    ["bench"],
    ["bench", "nothing"],
    ["plan"],
    ["plan", "PACK", "--hit-rate", "1.1"],
    ["plan", "PACK", "--ram", "lots"],
    ["serve"],
    ["serve", "PACK", "--lanes", "0"],
    ["serve", "PACK", "--lanes", "many"],
    ["serve", "PACK", "--device", "tpu"],
    ["serve", "PACK", "--vram-budget", "lots"],
    ["serve", "PACK", "--vram-budget", "1025GiB"],
    ["serve", "PACK", "--park", "1"],
    ["serve", "PACK", "--context", "1"],
    ["serve", "PACK", "--context", str((1 << 20) + 1)],
    ["serve", "PACK", "--prefill-chunk", "8193"],
    ["serve", "PACK", "--http", "8000"],
    ["serve", "PACK", "--http", "unix:/tmp/s"],
    ["serve", "PACK", "--http", "192.0.2.1:80"],
    ["serve", "PACK", "--grpc", "unix:relative"],
    ["serve", "PACK", "--page", "on"],
    ["serve", "PACK", "--cluster", "../x"],
    ["serve", "PACK", "--nope"],
    ["generate", *PROMPT],
    ["generate", "PACK"],
    ["generate", "PACK", "--prompt-ids", "1,a"],
    ["generate", "PACK", "--prompt-ids", "-1"],
    ["generate", "PACK", *PROMPT, "--stop-ids", "a"],
    ["generate", "PACK", *PROMPT, "--logit-bias", "a"],
    ["generate", "PACK", *PROMPT, "--vram-budget", "lots"],
    ["generate", "PACK", *PROMPT, "--temperature", "hot"],
    ["status", "--cluster", "../x"],
    ["status", "MORE"],
    ["draft-vocab", "PACK"],
    ["draft-vocab", "PACK", "/dev/null"],
    ["doctor", "--nope"],
    ["doctor", "--cluster"],
    ["doctor", "--http", "8000"],
    ["doctor", "--vram-budget", "lots"],
]

REFUSED = [
    ("bad_pack", ["inspect", "{folder}/missing"]),
    ("bad_pack", ["verify", "{folder}/file"]),
    ("bad_pack", ["serve", "{folder}/missing"]),
    ("bad_pack", ["serve", "{folder}/file"]),
    ("bad_pack", ["serve", "{folder}"]),
    ("bad_pack", ["generate", "{folder}/missing", *PROMPT]),
    ("bad_option", ["serve", "{folder}/missing", "--device", "cuda"]),
    ("bad_option", ["serve", "{folder}/missing", "--park", "0", "--park-disk", "1GiB"]),
    ("empty_prompt", ["generate", "{folder}/missing", "--prompt", ""]),
    ("empty_prompt", ["generate", "--address", "unix:/x", "--prompt-ids", ""]),
    ("unreachable", ["generate", "--address", "unix:{folder}/none", *PROMPT]),
    ("run_dir", ["status", "--cluster", "nobody"]),
    ("bad_identity", ["cluster", "invite", "../x"]),
    ("bad_identity", ["cluster", "revoke", "nobody"]),
]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for command in ("serve", "generate"):
        monkeypatch.setattr(f"coordinator.cli.{command}.configure_logging", lambda **_: None)  # of this whole process

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return (ended.value.code, *capsys.readouterr())

    return run


def check(ran, exit_code, code, *, as_json):
    assert ran[0] == exit_code
    assert ran[2].count("\n") == 1
    assert ran[2].startswith(f"error: {code}: ")
    if not as_json:
        assert ran[1] == ""
        return
    assert ran[1].count("\n") == 1
    assert json.loads(ran[1]) == {"error": {"code": code, "message": ran[2].removeprefix(f"error: {code}: ")[:-1]}}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_wrong_usage(run, words, as_json):
    name, *more = words
    check(run(name, *(["--json"] if as_json else []), *more), 2, "usage", as_json=as_json)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("code", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else value[0])
def test_refusals(run, tmp_path, code, words, as_json):
    (tmp_path / "file").touch()
    words = [word.format(folder=tmp_path) for word in words]
    check(run(*words, *(["--json"] if as_json else [])), 1, code, as_json=as_json)


def test_the_tables_have_every_command():
    assert set(COMMANDS) <= {words[0] for words in USAGE}


def test_the_pack_tools_fail_in_the_same_shape(tmp_path):
    for words, exit_code, code in (
        (["pack", tmp_path / "missing", tmp_path / "out", "--json"], 1, "bad_checkpoint"),
        (["inspect", tmp_path, "--json"], 1, "bad_pack"),
    ):
        (tmp_path / "manifest.msgpack").write_bytes(b"no manifest")  # past the first look
        done = cli(*words)
        check((done.returncode, done.stdout, done.stderr), exit_code, code, as_json=True)


def test_without_a_command_the_help_is_shown_and_the_last_line_says_so(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: expressway")
    assert err.splitlines()[-1] == "error: usage: a command is missing"


def raising(error):
    def command(*_, **__):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted: stopped by the user"),
        (Interrupted("stopped before it was ready", signal.SIGTERM), 143, "error: interrupted: stopped before it was "
         "ready"),
        (StartFailed("lane-0 was killed"), 1, "error: start_failed: lane-0 was killed"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: io: [Errno 13] Permission denied: '/x'"),
    ],
)  # fmt: skip
def test_every_end_has_its_code(run, monkeypatch, error, exit_code, line):
    monkeypatch.setattr("coordinator.cli.status.running_clusters", raising(error))
    assert run("status") == (exit_code, "", line + "\n")


def test_an_error_of_many_lines_ends_with_its_first(capsys):
    with pytest.raises(SystemExit):
        fail(["--ready-json"], "start_failed", "lane-0 ended; its log:\n    one\n    two", 1)
    out, err = capsys.readouterr()
    assert err == "    one\n    two\nerror: start_failed: lane-0 ended; its log:\n"
    assert json.loads(out)["error"]["message"].splitlines()[-1] == "    two"


def test_json_is_asked_for_by_an_option_and_not_by_an_argument():
    assert wants_json(["inspect", "--json", "p"])
    assert wants_json(["serve", "p", "--ready-json"])
    assert not wants_json(["inspect", "--", "--json"])
    assert not wants_json([])


def test_formats_in_the_help_are_those_that_can_be_written(run):
    assert set(EXPERT_FORMATS) == set(WRITTEN_FORMATS)
    code, out, _ = run("pack", "--help")
    assert code == 0
    for name in (*EXPERT_FORMATS, "bf16"):
        assert name in out
