"""Known answers of Random123's kat_vectors for philox4x32-10."""

import pytest

from lanes.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_the_top_53_bits_of_the_first_two_words():
    assert uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53


def test_uniform_depends_on_all_64_bits_of_seed_and_position():
    draws = {uniform(s, p) for s in (1, 1 << 31, 1 << 32, 1 << 63) for p in (0, 1, 1 << 32, 1 << 40)}
    assert len(draws) == 16


def test_uniform_stays_below_one_and_fills_the_interval():
    draws = [uniform(7, p) for p in range(4000)]
    assert 0.0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1.0
    assert abs(sum(draws) / 4000 - 0.5) < 0.02
