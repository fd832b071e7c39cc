"""The log of prefixes: who applies it knows what is there, however far behind he was."""

from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.state.prefixes import Place, PrefixLog

KEYS = [(bytes([n]) * 16, 64 * n) for n in range(6)]
STATES = st.lists(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(Place)), max_size=12)


class Reader:
    """Applies what it is told, as the coordinator does."""

    def __init__(self):
        self.seen, self.known, self.building = None, {}, None

    def catch_up(self, log):
        for news in log.after(self.seen):
            if news.snapshot:
                self.building = dict(news.added) if self.building is None else self.building | dict(news.added)
                if news.complete:
                    self.known, self.building = self.building, None
            else:
                assert news.sequence == self.seen + 1, "a gap"
                self.known |= dict(news.added)
                for key in news.removed:
                    del self.known[key]
            self.seen = news.sequence


@given(STATES, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_a_reader_knows_what_is_there(states, awake, news, per_event):
    was = limits.PREFIX_NEWS, limits.PREFIXES_PER_EVENT
    limits.PREFIX_NEWS, limits.PREFIXES_PER_EVENT = news, per_event
    try:
        log, reader = PrefixLog(), Reader()
        for state, reads in zip(states, awake, strict=False):
            log.publish(state)
            if reads:
                reader.catch_up(log)
                assert reader.known == state
                assert log.after(reader.seen) == []
    finally:
        limits.PREFIX_NEWS, limits.PREFIXES_PER_EVENT = was


def test_nothing_new_is_no_event():
    log = PrefixLog()
    log.publish({KEYS[0]: Place.LIVE})
    log.publish({KEYS[0]: Place.LIVE})
    assert log.sequence == 1
    log.publish({KEYS[0]: Place.PARKED})
    assert [(n.added, n.removed) for n in log.after(1)] == [(((KEYS[0], Place.PARKED),), ())]


def test_a_reader_that_fell_behind_gets_a_snapshot(monkeypatch):
    monkeypatch.setattr(limits, "PREFIX_NEWS", 2)
    log = PrefixLog()
    for key in KEYS[:3]:
        log.publish({key: Place.LIVE})
    assert [n.snapshot for n in log.after(1)] == [False, False]
    assert [n.snapshot for n in log.after(0)] == [True]


def test_events_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "PREFIXES_PER_EVENT", 2)
    log = PrefixLog()
    log.publish(dict.fromkeys(KEYS[:2], Place.LIVE))
    assert [len(n.added) for n in log.after(0)] == [2]
    log.publish(dict.fromkeys(KEYS, Place.LIVE))
    assert [(len(n.added), n.snapshot, n.complete) for n in log.after(1)] == [
        (2, True, False), (2, True, False), (2, True, True),
    ]  # fmt: skip


def test_of_too_many_the_last_ones_are_told(monkeypatch):
    monkeypatch.setattr(limits, "PREFIXES", 2)
    log = PrefixLog()
    log.publish(dict.fromkeys(KEYS, Place.LIVE))
    assert [key for news in log.after(None) for key, _ in news.added] == KEYS[-2:]
