"""Who is to blame for the end of a process: not the batch in progress, where something else was seen to end it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from consumer.app.wiring import LiveRun
from protocol.errors import RankLostError


class Scene:
    def __init__(self) -> None:
        self.stopped = False
        self.taken_back: list[int] = []
        self.health, self.errors = MagicMock(), MagicMock()
        self.feed = SimpleNamespace(last=None)
        heartbeat: Any = SimpleNamespace(health=self.health, stop_requested=lambda: self.stopped)
        connections: Any = SimpleNamespace(pipeline=SimpleNamespace(undo_try=self.taken_back.append))
        unused: Any = None
        feed: Any = self.feed
        self.run = LiveRun(unused, unused, unused, unused, feed, connections, heartbeat, self.errors)

    def begin(self, last_step: int) -> None:
        self.feed.last = SimpleNamespace(last_step=last_step)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_once_a_stop_is_requested_no_try_counts(scene: Scene) -> None:
    scene.begin(4)
    scene.run.beat()
    assert scene.taken_back == []
    scene.stopped = True
    scene.run.beat()
    scene.begin(6)  # claimed in the moment of the request
    scene.run.beat()
    assert scene.taken_back == [4, 6]
    assert scene.health.beat.call_count == 3


def test_a_stop_before_the_first_batch_takes_nothing_back(scene: Scene) -> None:
    scene.stopped = True
    scene.run.beat()
    assert scene.taken_back == []


def test_a_lost_rank_is_told_and_its_step_is_no_try(scene: Scene) -> None:
    scene.begin(4)
    error = RankLostError("rank 1 ended")
    scene.run.lost(error)
    scene.errors.note.assert_called_once_with(error)
    assert scene.taken_back == [4]
