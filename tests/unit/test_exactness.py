"""The exactness command: on what it runs."""

from bench import exactness
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack


def test_an_end_of_sequence_stands_among_what_windows_read(tmp_path):
    with Pack.open(tiny_pack(tmp_path, "q4g32")) as pack:
        ground, _ = exactness.ground(pack, "cpu", (20, 8, 32))
        assert (len(ground.ids), len(ground.rest)) == (28, 8)
        assert ground.rest[4] == pack.manifest.config["eos_token_id"]


def test_every_row_has_a_name_of_its_own():
    names = [name for rows in exactness.TABLE.values() for name in rows]
    assert len(set(names)) == len(names)
    assert all(any(word in name for name in names) for word in exactness.INTERPRETED)
