"""The manager against daemons in memory."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from slipstream_extras.ray.manager import Events, Manager, in_words, saved
from slipstream_extras.ray.plan import Amounts, DaemonReport, Plan, prepare
from tests.unit.slipstream_extras.ray.builders import plan, report


class Fake:
    """What `Actors` does, at once, with as many producers as there are places."""

    def __init__(self, places: int = 10) -> None:
        self.all: dict[str, DaemonReport] = {}
        self.silent: set[str] = set()
        self.keys: dict[str, list[bytes]] = {}
        self.places = places

    def names(self) -> set[str]:
        return set(self.all)

    def create(self, plan: Plan, name: str) -> None:
        assert name not in self.all
        self.all[name] = report(name, "new", starts=0)
        if len(self.all) > self.places:
            self.silent.add(name)

    def remove(self, name: str) -> None:
        del self.all[name]

    def begin(self, name: str, keys: Mapping[str, bytes]) -> None:
        self.keys.setdefault(name, []).append(keys.get(f"{name}.secret", b""))
        self.change(name, phase="running", starts=1)

    def drain(self, name: str) -> None:
        self.change(name, draining=True)

    def reports(self) -> dict[str, DaemonReport | str]:
        return {name: "does not answer" if name in self.silent else found for name, found in self.all.items()}

    def without_room(self) -> list[str]:
        return sorted(self.silent)

    def free(self) -> dict[str, Amounts]:
        return {"10.0.0.6": {"CPU": 1.0}}

    def change(self, name: str, **fields: object) -> None:
        self.all[name] = msgspec.structs.replace(self.all[name], **fields)


class Bench:
    def __init__(self, folder: Path, fake: Fake, **changes: object) -> None:
        self.folder, self.fake, self.now = folder, fake, 0.0
        (folder / "cluster").mkdir()
        prepare(folder / "keys")
        self.events = Events(folder / "cluster/events.log")
        self.manager = Manager(fake, plan(folder, **changes), self.events, lambda: self.now)

    def tick(self, times: int = 3) -> None:
        for _ in range(times):
            self.manager.tick()
            self.now += 1

    @property
    def said(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.events.since(0)[1]]

    @property
    def authorized(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "keys/authorized").iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, Fake())


def test_from_nothing_to_a_run(bench: Bench) -> None:
    bench.tick()
    assert sorted(bench.fake.all) == ["producer-1", "producer-2", "trainer"]
    assert all(found.phase == "running" for found in bench.fake.all.values())
    assert bench.authorized == ["producer-1", "producer-2"]
    secrets = [bench.fake.keys[name][0] for name in ("producer-1", "producer-2")]
    assert all(secrets)
    assert secrets[0] != secrets[1]
    assert sorted(bench.said) == sorted(f"{name}: runs on 10.0.0.6" for name in bench.fake.all)
    assert not any(secret.decode().split()[-1] in line for secret in secrets for line in bench.said)
    bench.tick(20)
    assert len(bench.said) == 3, "nothing changed"


def test_an_actor_that_ray_started_again_begins_with_a_new_key(bench: Bench) -> None:
    bench.tick()
    bench.fake.all["producer-1"] = report("producer-1", "new", starts=0)
    bench.tick()
    assert len(set(bench.fake.keys["producer-1"])) == 2
    assert len(bench.fake.keys["producer-2"]) == 1


def test_an_end_is_an_event_also_where_the_next_start_came_before_the_next_look(bench: Bench) -> None:
    bench.tick()
    bench.fake.change("producer-1", starts=2, exit_code=-9)
    bench.fake.change("producer-2", phase="pausing", exit_code=75, message="exit status 75; starts again in 1 s")
    bench.tick()
    bench.fake.change("producer-2", phase="running", starts=2, message="")
    bench.tick()
    assert bench.said[3:] == [
        "producer-1: ended with killed by SIGKILL; has started again",
        "producer-1: runs on 10.0.0.6, start 2",
        "producer-2: ended with exit status 75; starts again in 1 s",
        "producer-2: runs on 10.0.0.6, start 2",
    ]


def test_more_and_fewer_producers(bench: Bench) -> None:
    bench.tick()
    bench.manager.scale(4)
    bench.tick()
    assert len(bench.fake.all) == 5
    bench.manager.scale(1)
    bench.tick()
    assert [found.name for found in bench.fake.all.values() if found.draining] == [
        "producer-2",
        "producer-3",
        "producer-4",
    ]
    bench.fake.change("producer-3", phase="ended", exit_code=0)
    bench.manager.scale(4)
    bench.tick()
    assert sorted(bench.fake.all) == ["producer-1", "producer-2", "producer-3", "producer-4", "trainer"]
    assert not bench.fake.all["producer-3"].draining, "it had ended, and another one took its place"
    bench.manager.scale(1)
    for name in ("producer-2", "producer-3", "producer-4"):
        bench.fake.change(name, phase="ended", exit_code=0)
    bench.tick()
    assert sorted(bench.fake.all) == ["producer-1", "trainer"]
    assert bench.authorized == ["producer-1"]
    assert "producers: 2 -> 4, as asked" in bench.said
    assert (found := saved(bench.folder)) is not None
    assert found.producers == 1


def test_the_end_of_the_run_gives_the_resources_of_producers_back(bench: Bench) -> None:
    bench.tick()
    bench.fake.change("trainer", phase="ended", exit_code=0, since=time.time())
    bench.fake.change("producer-1", phase="ended", exit_code=0)
    bench.tick()
    assert sorted(bench.fake.all) == ["producer-1", "producer-2", "trainer"]
    assert not bench.fake.all["producer-2"].draining, "it ends by itself"
    bench.fake.change("trainer", since=time.time() - 60)
    bench.tick()
    assert bench.fake.all["producer-2"].draining
    bench.fake.change("producer-2", phase="ended", exit_code=0)
    bench.tick()
    assert sorted(bench.fake.all) == ["trainer"]
    bench.tick(5)
    assert sorted(bench.fake.all) == ["trainer"]


def test_a_trainer_that_stays_down_says_why_and_comes_back_when_it_is_asked_again(bench: Bench) -> None:
    bench.tick()
    bench.fake.change("trainer", phase="ended", exit_code=78, message="rl-trainer: error: run.yaml:3: lora.r")
    bench.tick(5)
    assert bench.fake.all["trainer"].phase == "ended"
    assert bench.said[-1] == "trainer: ended with 78 | rl-trainer: error: run.yaml:3: lora.r"
    bench.manager.adopt(plan(bench.folder, producers=3))
    bench.tick()
    assert bench.fake.all["trainer"].phase == "running"
    assert len(bench.fake.all) == 4


def test_what_has_no_room_is_said_with_what_is_free(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake(places=2))
    bench.tick(8)
    [silent] = bench.fake.silent
    assert silent == "producer-2"
    text = "producer-2: needs 1 GPU and 4 CPU on one node. 10.0.0.6 has 0 GPU and 1 CPU free"
    assert bench.manager.report.missing == text
    assert bench.manager.report.unreachable == [f"{silent}: does not answer"]
    assert bench.said.count(f"{silent}: does not answer") == 1


def test_a_new_manager_goes_on_with_what_it_finds(bench: Bench) -> None:
    bench.tick()
    bench.manager.scale(3)
    bench.tick()
    kept = saved(bench.folder)
    assert kept is not None
    after = Manager(bench.fake, kept, bench.events, lambda: bench.now)
    after.tick()
    assert len(bench.fake.all) == 4
    assert [len(given) for given in bench.fake.keys.values()] == [1, 1, 1, 1]


def test_a_saved_plan_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert saved(tmp_path) is None
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/plan.json").write_text('{"run_dir": 7}')
    assert saved(tmp_path) is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (report("trainer", starts=2), "runs on 10.0.0.6, start 2"),
        (report("trainer", draining=True), "drains on 10.0.0.6"),
        (
            report("trainer", "pausing", message="exit status 75; starts again"),
            "ended with exit status 75; starts again",
        ),
        (report("trainer", "ended", exit_code=0), "ended with 0"),
        (report("trainer", "locked", message="another trainer still works"), "another trainer still works"),
        (report("trainer", "new"), "new"),
    ],
)
def test_what_is_said_of_a_daemon(found: DaemonReport, text: str) -> None:
    assert in_words(found) == text
