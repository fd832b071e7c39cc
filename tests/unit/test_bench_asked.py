"""Options of benches are refused before a model is made for them."""

import argparse

import pytest

from bench import asked, decode, exactness, prefill, two_lanes


def test_percents():
    assert asked.percents("75,100,0") == [0.75, 1.0, 0.0]
    assert asked.percents("") == []


@pytest.mark.parametrize("text", ["abc", "75,", "0.5", "101", "-1"])
def test_no_percents(text):
    with pytest.raises(argparse.ArgumentTypeError, match="percents"):
        asked.percents(text)


def test_sizes_and_cores_stay_as_they_were_written():
    assert asked.sizes("16GiB,0") == ["16GiB", "0"]
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        asked.sizes("1GiB,1XB")
    with pytest.raises(argparse.ArgumentTypeError, match="core 9999"):
        asked.cores("9999")


@pytest.mark.parametrize(
    ("built", "driver", "refusal"),
    [("2.13.0+cpu", True, "built for the CPU"), ("2.13.0", False, "no CUDA driver"), ("2.13.0+cu130", True, None)],
)
def test_a_device(monkeypatch, built, driver, refusal):
    def load(name):
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(asked, "version", lambda name: built)
    monkeypatch.setattr(asked.ctypes, "CDLL", load)
    assert asked.device("cpu") == "cpu"
    if refusal is None:
        assert asked.device("cuda") == "cuda"
    else:
        with pytest.raises(argparse.ArgumentTypeError, match=refusal):
            asked.device("cuda")


@pytest.mark.parametrize(
    ("bench", "argv"),
    [
        (decode, ["--drafted", "x"]), (decode, ["--drafted-at", "175"]), (decode, ["--forced", "a"]),
        (decode, ["--vram-budget", "1GiB,1XB"]), (decode, ["--cores", "9999"]), (decode, ["--device", "gpu"]),
        (two_lanes, ["--vram-budget", "1XB"]), (prefill, ["--device", "gpu"]),
        (exactness, ["--random", "q4g64", "--device", "cpu"]),
    ],
)  # fmt: skip
def test_refused_at_once(bench, argv, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(argv)
    assert ended.value.code == 2
    assert f"argument {argv[0]}" in capsys.readouterr().err


def test_no_row_of_the_exactness_table_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(exactness.triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(exactness.bare_host, "stop_after", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        exactness.main(["--device", "cpu", "--only", "no such row"])
    assert ended.value.code == 2
    assert "--only" in capsys.readouterr().err
