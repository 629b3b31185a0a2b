"""The order in which a run ends, against actors in memory."""

from pathlib import Path

import pytest

from slipstream_extras.ray import actors, down
from slipstream_extras.ray import manager as managing
from slipstream_extras.ray.plan import DaemonReport
from slipstream_extras.ray.session import Session
from tests.unit.slipstream_extras.ray.builders import report


class FakeActors:
    """Those that were told to drain have ended at the next look, but for the stubborn."""

    def __init__(self, stubborn: set[str], *, finished: bool = False) -> None:
        self.done: list[str] = []
        self._stubborn = stubborn
        self._ended = {"trainer"} if finished else set[str]()
        self._names = {"trainer", "producer-1", "producer-2"}

    def names(self) -> set[str]:
        return set(self._names)

    def without_room(self) -> list[str]:
        return []

    def reports(self) -> dict[str, DaemonReport | str]:
        return {name: report(name, "ended", exit_code=0) if name in self._ended else "silent" for name in self._names}

    def drain(self, name: str) -> None:
        self.done.append(f"drain {name}")
        self._ended |= {name} - self._stubborn

    def kill(self, name: str) -> None:
        self.done.append(f"kill {name}")
        self._names.discard(name)

    def remove(self, name: str) -> None:
        self.done.append(f"remove {name}")
        self._names.discard(name)


@pytest.fixture
def take_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of these actors, on a clock that each look puts forward by a second; how long it took."""
    now = [0.0]
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(managing.ManagerHandle, "find", lambda: None)

    def work(fake: FakeActors) -> float:
        monkeypatch.setattr(actors, "Actors", lambda: fake)
        down.take_down(tmp_path, Session("10.0.0.5:6379", None), 100)
        return now[0]

    return work


def test_producers_say_goodbye_before_the_trainer_writes_its_checkpoint(take_down) -> None:
    fake = FakeActors(set())
    take_down(fake)
    assert sorted(fake.done[:2]) == ["drain producer-1", "drain producer-2"]
    assert sorted(fake.done[2:4]) == ["remove producer-1", "remove producer-2"]
    assert fake.done[4:] == ["drain trainer", "remove trainer"]


def test_what_does_not_end_is_killed_at_the_deadline(take_down, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeActors({"producer-2"})
    took_s = take_down(fake)
    assert fake.done.count("kill producer-2") == 1
    assert fake.done[-2:] == ["drain trainer", "remove trainer"], "the trainer gets its turn all the same"
    assert 100 < took_s < 110
    assert "killed, because they had not ended by the deadline: producer-2" in capsys.readouterr().out


def test_producers_of_a_run_that_has_finished_end_by_themselves(take_down) -> None:
    fake = FakeActors(set(), finished=True)
    assert take_down(fake) >= 30
    assert sorted(fake.done[:2]) == ["drain producer-1", "drain producer-2"], "these did not"
