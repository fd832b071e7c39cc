"""Options of `serve`, parsed: addresses, sizes, cores, and every refusal with its reason."""

import socket

import pytest

from coordinator.config import (
    CONTEXT_MAX,
    CONTEXT_MIN,
    DEFAULT_CPU_BUDGET,
    PARK_AUTO,
    PARK_MIN_BYTES,
    PREFILL_CHUNK_MAX,
    SIZE_MAX_BYTES,
    Address,
    check_pack,
    check_park,
    choose_address,
    lane_budget,
    parse_park,
    parse_size,
)
from coordinator.errors import BadAddress, BadOption, BadPack, RunDirError
from lanes import config as lane_config
from lanes.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("127.9.9.9:1", "127.9.9.9:1"),
        ("localhost:0", "127.0.0.1:0"),
        ("[::1]:65535", "[::1]:65535"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_addresses(text, said):
    assert str(Address.parse(text)) == said


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "192.168.0.1:80", "10.0.0.1:1", "[fe80::1]:80"])
def test_addresses_that_others_could_reach_are_refused_with_the_reason(text):
    with pytest.raises(BadAddress, match="no keys and no TLS"):
        Address.parse(text)


@pytest.mark.parametrize(
    "text", ["", ":", "8000", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:١",
             "example.org:80", "unix:relative"]
)  # fmt: skip
def test_addresses_that_are_none(text):
    with pytest.raises(BadAddress):
        Address.parse(text)


def test_a_unix_address_longer_than_a_socket_path_is_refused():
    with pytest.raises(RunDirError, match="at most 107"):
        Address.parse("unix:/" + "x" * 107)


def test_a_taken_port_is_refused_and_port_0_becomes_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadAddress, match=f"127.0.0.1:{port}: cannot listen there"):
            choose_address(Address("127.0.0.1", port))
    chosen = choose_address(Address("127.0.0.1", 0))
    assert chosen.host == "127.0.0.1"
    assert chosen.port > 0


def test_unix_addresses_live_stale_and_foreign(tmp_path):
    path = tmp_path / "door.sock"
    address = Address.parse(f"unix:{path}")
    assert choose_address(address) == address
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        with pytest.raises(BadAddress, match="somebody else listens"):
            choose_address(address)
    assert choose_address(address) == address  # nobody listens any more: the stale socket was removed
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(BadAddress, match="something else"):
        choose_address(address)
    assert path.read_text() == "precious"
    with pytest.raises(BadAddress, match="no directory"):
        choose_address(Address.parse(f"unix:{tmp_path}/missing/door.sock"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("256mib", 256 << 20),
        ("2GB", 2 * 10**9),
        ("7 B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1TiB?", "1e9", "0x10", "1.5.5GiB", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(BadOption):
        parse_size(text)


def test_a_park_pool_that_would_hold_nothing_is_refused():
    assert [parse_park(text) for text in ("auto", "0", "1MiB")] == [PARK_AUTO, 0, PARK_MIN_BYTES]
    with pytest.raises(BadOption, match="at least 1MiB"):
        parse_park(str(PARK_MIN_BYTES - 1))
    for pool, disk in ((PARK_AUTO, 1), (PARK_MIN_BYTES, 1), (0, 0)):
        check_park(pool, disk)
    with pytest.raises(BadOption, match="--park-disk"):
        check_park(0, 1)


def test_what_is_no_pack(tmp_path):
    with pytest.raises(BadPack, match="no such directory"):
        check_pack(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(BadPack, match="is a file; a pack is a directory"):
        check_pack(tmp_path / "file")
    with pytest.raises(BadPack, match=r"no manifest\.msgpack"):
        check_pack(tmp_path)
    (tmp_path / "manifest.msgpack").touch()
    assert check_pack(tmp_path) == tmp_path.resolve()


LANE = ["--owner", "/o", "--pack", "/p", "--listen", "unix:/l"]


def lane_takes(*options):
    """What a lane itself says to options: None, or its words."""
    try:
        lane_config.parse([*LANE, "--vram-budget", "0", *map(str, options)], {}, frozenset({0}))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("option", "inside", "outside"),
    [("--context", CONTEXT_MIN, CONTEXT_MIN - 1), ("--context", CONTEXT_MAX, CONTEXT_MAX + 1),
     ("--prefill-chunk", 1, 0), ("--prefill-chunk", PREFILL_CHUNK_MAX, PREFILL_CHUNK_MAX + 1),
     ("--vram-budget", SIZE_MAX_BYTES, SIZE_MAX_BYTES + 1)],
)  # fmt: skip
def test_bounds_are_those_of_a_lane(option, inside, outside):
    assert lane_takes(option, inside) is None
    assert lane_takes(option, outside) is not None


def test_sizes_end_where_a_lane_ends():
    assert parse_size("1024GiB") == SIZE_MAX_BYTES
    with pytest.raises(BadOption, match="more than 1024GiB"):
        parse_size(str(SIZE_MAX_BYTES + 1))


def test_a_lane_on_a_gpu_is_told_its_share():
    assert lane_budget("cpu", None) == parse_size(DEFAULT_CPU_BUDGET)
    assert lane_budget("cpu", 5) == lane_budget("cuda", 5) == 5
    with pytest.raises(BadOption, match="--vram-budget: say how much"):
        lane_budget("cuda", None)
    assert lane_takes("--device", "cuda") is None
