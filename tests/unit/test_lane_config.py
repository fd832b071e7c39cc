import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.config import _ranges, parse, parse_bytes, parse_cores
from lanes.errors import ConfigError

CORES = frozenset({0, 1, 2, 3, 5})
LEAST = ["--owner", "/run/o.sock", "--pack", "/p", "--listen", "unix:/run/x/lane-2.sock", "--vram-budget", "2GiB"]


def test_the_least_command_line():
    config = parse(LEAST, {}, CORES)
    assert config.vram_budget_bytes == 2 << 30
    assert config.cores == (0, 1, 2, 3, 5)
    assert not config.pinned
    assert str(config.listen) == "/run/x/lane-2.sock"
    assert str(config.region_socket) == "/run/x/lane-0.region.sock"
    assert config.context_tokens is None
    assert config.ngram_cache_bytes == 64 << 20
    assert config.state_budget_bytes == 512 << 20
    assert config.drafts is None
    assert not config.kv_int8
    assert config.expert_isa is None
    assert config.trace_routing is None
    assert config.profiles is None


def test_everything():
    config = parse(
        [*LEAST, "--device", "cpu", "--cores", "1-2,5", "--name", "lane-7", "--context", "4096",
         "--prefill-chunk", "64", "--ngram-cache", "1MiB", "--state-budget", "3MiB", "--region-socket", "/run/r.sock",
         "--trace-routing", "t.trace", "--drafts", "2", "--kv", "int8", "--profiles", "p", "--log-json"],
        {"EXPERT_ISA": "avx2"}, CORES,
    )  # fmt: skip
    assert config.cores == (1, 2, 5)
    assert config.pinned
    assert config.log_json
    assert (config.context_tokens, config.prefill_chunk_rows, config.expert_isa) == (4096, 64, "avx2")
    assert str(config.region_socket) == "/run/r.sock"
    assert str(config.trace_routing) == "t.trace"
    assert str(config.profiles) == "p"
    assert config.ngram_cache_bytes == 1 << 20
    assert config.state_budget_bytes == 3 << 20
    assert config.drafts == 2
    assert config.kv_int8
    with pytest.raises(AttributeError):
        config.name = "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--vram-budget", "two"], r"--vram-budget: 'two' is not a size"),
        (["--vram-budget", "-1"], "--vram-budget"),
        (["--vram-budget", "1025GiB"], "--vram-budget: .*1TiB"),
        (["--state-budget", "-1"], "--state-budget"),
        (["--ngram-cache", "many"], "--ngram-cache: 'many' is not a size"),
        (["--ngram-cache", "1025GiB"], "--ngram-cache: .*1TiB"),
        (["--cores", "4"], r"--cores: core 4 is not one that this process may use \(0-3,5\)"),
        (["--cores", "3-1"], "--cores: .*backwards"),
        (["--cores", ""], "--cores: .*not a list"),
        (["--cores", "0,,1"], "--cores"),
        (["--context", "1"], "--context: '1' is not a whole number from 2 to 1048576"),
        (["--context", "1048577"], "--context"),
        (["--drafts", "4"], "--drafts: '4' is not a whole number from 0 to 3"),
        (["--drafts", "-1"], "--drafts"),
        (["--prefill-chunk", "0"], "--prefill-chunk: '0' is not a whole number from 1 to 8192"),
        (["--prefill-chunk", "8193"], "--prefill-chunk"),
        (["--prefill-chunk", "1e3"], "--prefill-chunk"),
        (["--name", "Lane 1"], "--name"),
        (["--name", "x" * 33], "--name"),
        (["--listen", "127.0.0.1:80"], "--listen: .*Unix socket"),
        (["--listen", "unix:" + "/x" * 54], "--listen: a socket path has 1 to 107 bytes"),
        (["--device", "cuda", "--kv", "int8"], "--kv: 'int8' is for lanes on the cpu"),
        (["--kv", "int4"], "--kv: invalid choice"),
        (["--device", "tpu"], "--device"),
        (["--vram", "1"], "--vram"),
    ],
)
def test_refused_with_the_option_and_the_range(change, message):
    with pytest.raises(ConfigError, match=message):
        parse([*LEAST, *change], {}, CORES)


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match="--vram-budget"):
        parse(LEAST[:-2], {}, CORES)


def test_an_unknown_instruction_set():
    with pytest.raises(ConfigError, match="EXPERT_ISA"):
        parse(LEAST, {"EXPERT_ISA": "neon"}, CORES)


def test_limits_themselves_are_accepted():
    at = ["--context", "1048576", "--prefill-chunk", str(limits.MAX_PREFILL_CHUNK_ROWS), "--vram-budget", "1TiB"]
    assert parse([*LEAST, *at], {}, CORES).prefill_chunk_rows == 8192


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2gb", 2 * 10**9), ("1 KiB", 1024)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1e9", "0x10", "1..5", "1,5", "٣", "1 2", "9" * 16])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_core_lists_round_trip(cores):
    assert parse_cores(_ranges(sorted(cores)), frozenset(range(301))) == tuple(sorted(cores))


@given(st.text(max_size=12))
def test_core_lists_are_total(text):
    with contextlib.suppress(ValueError):
        assert set(parse_cores(text, CORES)) <= CORES
