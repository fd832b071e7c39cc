"""`python -m shared_experts pack|inspect|verify`: exit codes, one line of error, JSON that says what is there."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from shared_experts.__main__ import main
from tests.fakes.checkpoints import small_checkpoint


@pytest.fixture
def restore_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def checkpoint(tmp_path, restore_sigterm):
    return small_checkpoint(tmp_path / "c", tokenizer=True)


def run(capsys, *arguments):
    if "pack" in arguments[:1] and not {"--golden", "--help"} & set(arguments):
        arguments += ("--no-golden",)  # it starts a process that loads torch
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_pack_inspect_verify_in_json(tmp_path, checkpoint, capsys):
    code, out, err = run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "q4g32", "--dense", "f32", "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert made["experts"]["format"] == "q4g32"
    assert made["dense_dtype"] == "f32"
    code, out, err = run(capsys, "inspect", tmp_path / "p", "--json")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown == {k: v for k, v in made.items() if k != "seconds"}
    assert shown["bytes"] == sum(s["bytes"] for s in shown["sections"])
    code, out, err = run(capsys, "verify", tmp_path / "p", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["fingerprint"] == made["fingerprint"]


def test_the_golden_record_is_made_at_the_end_and_verified(tmp_path, checkpoint, capsys):
    assert run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "q4g32", "--golden")[::2] == (0, "")
    assert run(capsys, "verify", tmp_path / "p")[0] == 0
    record = tmp_path / "p" / "golden.json"
    data = record.read_bytes()
    assert b'"prompt"' in data
    record.write_bytes(data.replace(b'"layer":0', b'"layer":1', 1))
    for command in (("inspect",), ("inspect", "--json")):  # what `doctor` and `serve` ask, too
        code, _, err = run(capsys, *command, tmp_path / "p")
        assert (code, "golden.json: the body does not have its SHA-256" in err) == (1, True)
    code, _, err = run(capsys, "verify", tmp_path / "p")
    assert code == 1
    assert "golden.json: the body does not have its SHA-256" in err
    assert run(capsys, "pack", checkpoint, tmp_path / "q", "--experts", "q4g32")[0] == 0
    assert not (tmp_path / "q" / "golden.json").exists()


def test_text_output_names_what_matters(tmp_path, checkpoint, capsys):
    assert run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "f32")[0] == 0
    code, out, _ = run(capsys, "inspect", tmp_path / "p")
    assert code == 0
    for part in ("qwen4_exp", "f32", "5 layers (1 of them draft) of 4, 64 x 32", "ngram.1", "file.tokenizer.json"):
        assert part in out
    code, out, _ = run(capsys, "verify", tmp_path / "p", "--threads", "1")
    assert code == 0
    assert "sections are whole" in out


def test_refusals_are_one_line_with_the_code(tmp_path, checkpoint, capsys):
    assert run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "f32")[0] == 0
    code, out, err = run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "f32")
    assert (code, out) == (1, "")
    assert err.startswith("error: output_exists: ")
    code, _, err = run(capsys, "pack", checkpoint, tmp_path / "q")
    assert code == 1
    assert err.startswith("error: bad_checkpoint: ")
    assert "q4g32 fits" in err
    with (tmp_path / "p" / "experts.bin").open("r+b") as file:
        file.write(b"\xff")
    code, _, err = run(capsys, "verify", tmp_path / "p")
    assert code == 1
    assert err.startswith("error: bad_pack: ")
    assert "section 'experts.0'" in err
    code, out, err = run(capsys, "inspect", tmp_path / "nowhere", "--json")
    assert code == 1
    assert err.startswith("error: bad_pack: ")
    assert err.count("\n") == 1
    said = json.loads(out)["error"]
    assert err == f"error: {said['code']}: {said['message']}\n"
    code, _, err = run(capsys, "pack", checkpoint, tmp_path / "no" / "such" / "p", "--experts", "f32")
    assert code == 1
    assert err.startswith("error: io: ")


@pytest.mark.parametrize(
    "arguments",
    [["pack"], ["pack", "a"], ["pack", "a", "b", "--experts", "q9"], ["verify"], ["inspect", "a", "b"], ["nothing"],
     ["verify", "a", "--threads", "0"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_two(arguments, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: usage: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["pack", "--help"], ["inspect", "--help"], ["verify", "--help"]])
def test_help(arguments, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Usage: python -m shared_experts" in out


def test_a_terminal_sees_progress_on_standard_error(tmp_path, checkpoint):
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "shared_experts", "pack", checkpoint, tmp_path / "p", "--experts", "f32", "--json",
               "--no-golden"]  # fmt: skip
    done = subprocess.run(
        command, stderr=follower, stdout=subprocess.PIPE, timeout=60, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert done.returncode == 0
    assert json.loads(done.stdout)["experts"]["format"] == "f32"
    assert b"pack" in shown


def test_sigterm_stops_and_the_next_run_resumes(tmp_path, restore_sigterm):
    from dataclasses import replace

    from tests.fakes.checkpoints import SMALL

    large = replace(SMALL, hidden_size=256, ple_embed_dim=256, moe_intermediate_size=256, num_experts=32)
    small_checkpoint(tmp_path / "c", large)
    command = [
        sys.executable,
        "-m",
        "shared_experts",
        "pack",
        tmp_path / "c",
        tmp_path / "p",
        "--threads",
        "1",
        "--no-golden",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while b'"done"' not in read(tmp_path / ".p.partial" / "journal") and time.monotonic() < deadline:
        time.sleep(0.002)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.decode() == "error: interrupted: stopped by the user\n"
    assert sorted(os.listdir(tmp_path)) == [".p.partial", "c"]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0
    assert "note: resuming: " in done.stderr.decode()
    assert sorted(os.listdir(tmp_path)) == ["c", "p"]


def read(path):
    return path.read_bytes() if path.exists() else b""


def test_restart_discards_what_is_left(tmp_path, checkpoint, capsys, monkeypatch):
    from shared_experts import convert as convert_module

    def stop(partial, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_publish", stop)
        assert run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "f32")[0] == 128 + signal.SIGINT
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_publish", stop)
        code, _, err = run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "f32", "--restart")
        assert "resuming" not in err
    code, _, err = run(capsys, "pack", checkpoint, tmp_path / "p", "--experts", "q4g32")
    assert code == 0
    assert "starting over" in err
    assert "experts was f32, now q4g32" in err
