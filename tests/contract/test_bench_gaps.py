"""bench.gaps: every gap of every way is compared with that of its tokens, on real processes."""

from bench.gaps import cluster, measure, moves, shown


def test_moves_are_of_gaps_and_not_of_clocks() -> None:
    late = [(10.0 + k, float(k)) for k in range(4)]  # always ten seconds late: no gap has moved
    assert moves([late]) == [0.0] * 3
    late[2] = (12.5, 2.0)  # half a second later than the others: two gaps have
    assert moves([late, [(0.0, 0.0)], []]) == [0.0, 0.5, 0.5]
    assert shown([]) == {"gaps": 0}


async def test_all_three_ways_are_asked_on_real_processes() -> None:
    with cluster(2, 0.01) as at:
        assert len(at["lanes"]) == 2
        (found,) = await measure(at, 8, 1)
    assert found["direct"]["gaps"] == 14
    # a slow machine joins tokens to one event; then there are fewer gaps, and over HTTP none with stamps
    assert 0 < found["grpc"]["gaps"] <= 14
    assert 0 <= found["http"]["gaps"] <= 14
