"""However the demo is stopped, its last line says that nothing of it runs any more."""

import contextlib
import signal

import pytest
from click.testing import CliRunner

from bench import demo


class Cluster:
    """One that is up at once, and gone when its block ends."""

    ready_s, http, grpc, page, pids = 0.0, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", {"owner": 1}

    def __init__(self, *given, **options):
        self.pids = {"owner": 1, **{f"lane-{k}": 1 for k in range(demo.LANES)}}
        self.gone = False
        Cluster.last = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.gone = True


@pytest.fixture
def demonstrated(monkeypatch):
    async def talk(address, view):
        return []

    monkeypatch.setattr(demo, "Cluster", Cluster)
    monkeypatch.setattr(demo, "SideBySide", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(demo, "talk", talk)
    for name in ("aggregate", "region_memory", "summary", "free_address"):
        monkeypatch.setattr(demo, name, lambda *given: "127.0.0.1:0")
    before = signal.getsignal(signal.SIGTERM)
    yield monkeypatch
    signal.signal(signal.SIGTERM, before)


def test_stopped_while_it_stays_up(demonstrated):
    demonstrated.setattr(demo, "wait_for_signal", lambda: None)
    done = CliRunner().invoke(demo.main, [])
    assert (done.exit_code, Cluster.last.gone) == (0, True)
    assert done.output.splitlines()[-1] == "stopped: nothing of it runs any more"


def test_stopped_before_it_was_done(demonstrated):
    def talk(address, view):
        raise KeyboardInterrupt

    demonstrated.setattr(demo, "talk", talk)
    done = CliRunner().invoke(demo.main, [])
    assert (done.exit_code, Cluster.last.gone) == (130, True)
    assert done.output.splitlines()[-1] == "stopped before it was done; nothing of it runs any more"


def test_once_ends_with_its_answers(demonstrated):
    done = CliRunner().invoke(demo.main, ["--once"])
    assert done.exit_code == 0
    assert "stopped" not in done.output
