"""The plan, what becomes of a part, and the table of the GPU check."""

import asyncio
import threading
from pathlib import Path

import pytest

from benchmarks.gpu_check import engine, pair, runner
from benchmarks.gpu_check.engine_arm import numbers
from benchmarks.gpu_check.parity import distance
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.plan import ARMS, PLAN, Part, obstacle, planned
from benchmarks.gpu_check.report import table
from benchmarks.gpu_check.runner import Outcome, judged, run_parts
from producer.engine_contract import EngineLoad, EngineSteps
from protocol.gpu.nvml import Gpu


@pytest.mark.parametrize(
    ("minutes", "last"),
    [(0.1, "machine"), (5, "demo"), (15, "beside-trl"), (30, "pair-turns"), (55, PLAN[-1].name)],
)
def test_what_is_worth_most_comes_first(minutes: float, last: str) -> None:
    parts = planned(minutes)
    assert parts == list(PLAN[: len(parts)])
    assert parts[-1].name == last


def test_every_part_has_a_module_and_room_for_more_than_is_expected() -> None:
    folder = Path(runner.__file__).parent
    parts = (*PLAN, *ARMS)
    assert len({part.name for part in parts}) == len(parts)
    assert all((folder / f"{part.module}.py").exists() and part.limit_s > part.expected_s for part in parts)


@pytest.mark.parametrize(
    ("num_gpus", "gpus", "why"),
    [
        (0, [], ""),
        (1, [], "it needs an NVIDIA GPU"),
        (1, [3], ""),
        (2, [3], "it needs 2 GPUs, name them with --gpu 0,1"),
        (2, [0, 1], ""),
    ],
)
def test_parts_that_the_gpus_are_not_enough_for(num_gpus: int, gpus: list[int], why: str) -> None:
    assert obstacle(Part("one", "", "machine", num_gpus=num_gpus), gpus) == why


def test_what_becomes_of_a_part() -> None:
    found = {"what": "speed", "x": 1}

    def outcome(status: int | None, *lines: dict[str, object]) -> tuple[str, str, int]:
        judgement = judged("one", status, 60, 7.0, list(lines))
        return judgement.status, judgement.reason, len(judgement.findings)

    assert outcome(0, found) == ("done", "", 1)
    assert outcome(0, {"not_run": "no flash-attn"}) == ("not run", "no flash-attn", 0)
    assert outcome(1, found, {"failed": "ValueError: x"}) == ("failed", "ValueError: x", 1)
    assert outcome(-11, found) == ("failed", "killed by SIGSEGV", 1)
    assert outcome(None, found) == ("too slow", "it did not end within 60 s", 1)


@pytest.mark.long
def test_a_part_that_hangs_or_dies_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_ENTRY", "tests.unit.benchmarks.misbehaving_part")
    monkeypatch.setattr(runner, "_GRACE_S", 0.1)
    outcomes: list[Outcome] = []
    parts = [Part(name, "", "machine", limit_s=limit) for name, limit in (("dead", 60), ("half", 60), ("slow", 4))]
    asyncio.run(run_parts(parts, [2, 3], tmp_path, 200, outcomes.append))
    assert [(one.part, one.status) for one in outcomes] == [("dead", "failed"), ("half", "done"), ("slow", "too slow")]
    assert [one.findings for one in outcomes] == [[{"what": "GPU 0"}]] * 3
    sleeper = int((tmp_path / "slow" / "pid").read_text())
    assert not Path(f"/proc/{sleeper}").exists(), "what a part started ends with it, in whatever session"


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    asyncio.run(run_parts(PLAN[:2], [0], tmp_path, 1, outcomes.append))
    assert [(one.status, one.reason) for one in outcomes] == [("not run", "the time was over")] * 2


@pytest.mark.long
def test_arms_of_the_engine_end_with_its_time_and_say_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_ENTRY", "tests.unit.benchmarks.misbehaving_part")
    monkeypatch.setattr(runner, "_GRACE_S", 0.1)
    arms = [Part(name, "", "machine", limit_s=limit) for name, limit in (("dead", 60), ("half", 60), ("slow", 4))]
    monkeypatch.setattr(engine, "ARMS", arms)
    found = {one["what"]: one for one in engine.run(Place((2,), tmp_path, tmp_path), 200)}
    assert found == {
        "dead, GPU 0": {"what": "dead, GPU 0"},
        "dead": {"what": "dead", "failed": "killed by SIGKILL"},
        "half, GPU 0": {"what": "half, GPU 0"},
        "slow, GPU 0": {"what": "slow, GPU 0"},
        "slow": {"what": "slow", "too slow": "it did not end within 4 s"},
    }
    assert next(iter(engine.run(Place((2,), tmp_path, tmp_path), 1))) == {
        "what": "dead",
        "not run": "the time was over",
    }


def test_numbers_of_an_arm_are_those_of_the_steps_between_two_loads() -> None:
    before = EngineLoad(0.5, 8, 0, 3, EngineSteps(10, 1000, 800, 4))
    after = EngineLoad(0.5, 8, 0, 5, EngineSteps(30, 9000, 4800, 19))
    assert numbers(before, after, 2.0) == {
        "tokens_per_s": 2000.0,
        "steps_per_s": 10.0,
        "sequences_a_step": 200.0,
        "tokens_a_step": 400.0,
        "share_with_graph": 0.75,
        "preemptions": 2,
    }


def test_the_table() -> None:
    findings = [{"what": "a | b", "tokens": 128, "share": 0.123456, "wall_s": 1234.5, "holds": True}]
    shown = table([Outcome("one", "failed", "two\nlines", 3.0, findings), Outcome("two", "not run", "no GPU")])
    assert shown.splitlines()[2:] == [
        "| one | a \\| b | tokens 128, share 0.1235, wall_s 1,234, holds yes |",
        "| one | **failed** | two lines |",
        "| two | **not run** | no GPU |",
    ]


def test_distances_of_logprobs() -> None:
    found = distance([0.0, 0.0], [0.0, 0.5])
    assert (found["tokens"], found["abs_mean"], found["abs_max"]) == (2, 0.25, 0.5)
    ratio = 1.6487212707  # exp(0.5)
    assert found["ratio_mean"] == pytest.approx((1 + ratio) / 2)
    assert found["effective_share"] == pytest.approx((1 + ratio) ** 2 / (1 + ratio**2) / 2)


def test_the_most_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, used = threading.Event(), iter([3, 7, 5])

    def facts(index: int) -> Gpu | None:
        if (now := next(used, None)) is None:
            looked.set()
            return None
        return Gpu(index, "GPU-a", 10, 10 - now)

    monkeypatch.setattr(pair, "gpu_facts", facts)
    monkeypatch.setattr(pair, "_LOOK_EVERY_S", 0.001)
    with pair.most_used([2]) as most:
        assert looked.wait(30)
    assert most == {2: 7}
