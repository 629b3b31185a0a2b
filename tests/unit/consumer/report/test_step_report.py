"""One line per optimizer step, and numbers that describe what arrived."""

import errno
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from consumer.report import steps as progress
from consumer.report.steps import StepRecord, StepReport, batch_metrics, success_rates
from protocol.runtime import json_lines as rotated_lines
from replay.batch_selection import GroupStats, TrainingBatch
from replay.credit import CreditRecipe
from replay.curriculum import CurriculumState
from replay.rerolls import Grade
from replay.rewards import RewardRecipe
from replay.sources import ENVIRONMENTS, Parts, Sources
from tests.unit.consumer.builders import Growing, learning_metrics, rollout_group

METRICS = {"reward": 0.5, "staleness/mean": 1.0}


def recipe(*weights: float, credit: CreditRecipe | None = None) -> RewardRecipe:
    return RewardRecipe(np.array(weights, np.float32), credit=credit)


def report(
    folder: Path, counts: Counter[str] | None = None, *, first_step: int = 0, show_bar: bool = False
) -> StepReport:
    return StepReport(
        folder, counts or Counter(), learning_metrics(), max_steps=9, first_step=first_step, show_bar=show_bar
    )


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in rotated_lines.read(folder / "steps.jsonl")]


def write(place: StepReport, *numbers: int) -> None:
    for number in numbers:
        place.step(StepRecord(number, METRICS, wait_s=0.5, step_s=1.5, tokens=40))


def test_metrics_by_hand() -> None:
    used = rollout_group([[3], [4, 5]], rewards=[[1.0, 2.0], [0.0, math.nan]], truncated=[False, True], version=3,
                         token_versions=[3, 3, 4])  # fmt: skip
    dull = rollout_group([[3, 4, 5], [4]], rewards=[[1.0, math.nan], [math.nan, math.nan]], version=5)
    batch = TrainingBatch(6, 1, 6, [used], 1, [GroupStats.of(used), GroupStats.of(dull, "no_signal")])
    metrics = batch_metrics(batch, 5, recipe(1.0, 0.5), ["first", "second"])
    # weighted sums 2, 0, 1; the completion without any reward is left out
    assert metrics == pytest.approx(
        {
            "reward": 1.0,
            "reward_std": 1.0,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 7 / 4,
            "completions/max_length": 3.0,
            "completions/clipped_ratio": 0.25,
            "staleness/mean": 2.0,
            "staleness/max": 2.0,
            "staleness/token_mean": 5 / 3,
            "staleness/newer_token_share": 1 / 3,
            "replay/share": 0.0,
            "rewards/first/mean": 2 / 3,
            "rewards/first/std": math.sqrt(1 / 3),
            "rewards/second/mean": 2.0,
            "rewards/second/std": 0.0,
        }
    )


def test_what_reward_functions_logged_is_averaged_over_the_groups_in_which_they_did() -> None:
    groups = [rollout_group([[3], [4]], rewards=[0.0, 1.0]) for _ in range(3)]
    for group, metrics in zip(groups, ({"accuracy": 0.25, "reward": 9.0}, {}, {"accuracy": 0.75}), strict=True):
        object.__setattr__(group, "metrics", metrics)
    batch = TrainingBatch(1, 1, 1, groups[:1], 1, [GroupStats.of(group) for group in groups])
    metrics = batch_metrics(batch, 0, recipe(1.0), ["first"])
    assert (metrics["logged/accuracy"], metrics["logged/reward"], metrics["reward"]) == (0.5, 9.0, 0.5)
    object.__setattr__(groups[1], "metrics", {f"n{number}": 1.0 for number in range(1000)})
    batch = batch._replace(arrivals=[GroupStats.of(group) for group in groups])
    assert sum(name.startswith("logged/") for name in batch_metrics(batch, 0, recipe(1.0), ["first"])) == 64


def test_metrics_by_source_by_hand() -> None:
    sources = Sources(("easy", "hard", "none"), (0, 2, 9))
    easy = rollout_group([[3], [4, 5]], rewards=[0.0, 1.0], lease_id="0-1-0-1-s", generation_s=2.0)
    solved = rollout_group([[3, 4, 5], [4]], rewards=[1.0, 1.0], lease_id="0-0-0-1-s", generation_s=5.0)
    hard = rollout_group([[6], [7]], rewards=[math.nan, -1.0], lease_id="1-2-1-1-s")
    arrivals = [
        GroupStats.of(easy, grade=Grade("mixed", 2, 1)),
        GroupStats.of(solved, "no_signal", Grade("solved", 2, 2)),
        GroupStats.of(hard),
    ]
    batch = TrainingBatch(1, 1, 1, [easy, hard, hard, hard], 2, arrivals)
    metrics = batch_metrics(batch, 0, recipe(2.0), ["first"], sources)
    found = {name: value for name, value in metrics.items() if name.startswith("sources/")}
    assert found == pytest.approx(
        {
            "sources/easy/reward": 1.5,  # 0, 2, 2, 2
            "sources/easy/reward_std": 1.0,
            "sources/easy/frac_reward_zero_std": 0.5,
            "sources/easy/completions/mean_length": 7 / 4,
            "sources/easy/generation_s": 3.5,
            "sources/easy/success_rate": 0.75,
            "sources/easy/batch_share": 0.25,
            "sources/hard/reward": -2.0,
            "sources/hard/reward_std": 0.0,
            "sources/hard/frac_reward_zero_std": 0.0,
            "sources/hard/completions/mean_length": 1.0,
            "sources/hard/generation_s": 0.0,
            "sources/hard/batch_share": 0.75,
            "sources/none/batch_share": 0.0,
        }
    )
    assert {name: metrics[name] for name in metrics if name not in found} == batch_metrics(
        batch, 0, recipe(2.0), ["first"]
    )
    played = Sources(environments=Parts(ENVIRONMENTS, ("easy", "hard", "none"), sources.name_of))
    same = {name.replace("sources/", "environments/"): value for name, value in metrics.items()}
    assert batch_metrics(batch, 0, recipe(2.0), ["first"], played) == same


def test_counts_that_grow_meanwhile_are_reported_as_they_were(tmp_path: Path) -> None:
    counts = Growing(accepted=3, attempt_1_scored=4, attempt_1_successes=1)
    write(report(tmp_path, counts), 1)
    (line,) = rotated_lines.read(tmp_path / "steps.jsonl")
    assert line["success_rate/attempt_1"] == 0.25
    assert line["counts"] == {"accepted": 3, "attempt_1_scored": 4, "attempt_1_successes": 1}


def test_metrics_when_nothing_was_scored() -> None:
    group = rollout_group([[3], [4]], rewards=[math.nan, math.nan])
    metrics = batch_metrics(TrainingBatch(1, 1, 1, [group], 1), 0, recipe(1.0), ["first"])
    assert math.isnan(metrics["reward"])
    assert "rewards/first/mean" not in metrics


def test_metrics_of_a_batch_without_arrivals_are_of_the_batch() -> None:
    """One that is trained again after a crash, or from a journal."""
    group = rollout_group([[3], [4, 5, 6]], rewards=[0.0, 1.0], version=2)
    at_level = TrainingBatch(4, 1, 4, [group], 1, curriculum=CurriculumState(2, 0.25))
    found = batch_metrics(at_level, 3, recipe(2.0), ["first"])
    assert (found["curriculum/level"], found["curriculum/success_rate"]) == (2, 0.25)
    weighted = TrainingBatch(4, 1, 4, [group], 1, prompt_weights={"by_signal/failed": 0.5})
    assert batch_metrics(weighted, 3, recipe(2.0), ["first"])["by_signal/failed"] == 0.5
    metrics = batch_metrics(TrainingBatch(4, 1, 4, [group], 1), 3, recipe(2.0), ["first"])
    numbers = (metrics["reward"], metrics["completions/mean_length"], metrics["staleness/max"])
    assert numbers == (1.0, 2.0, 1.0)


def test_replayed_groups_have_an_age_and_no_staleness() -> None:
    fresh, recent, old = (rollout_group([[3], [4]], version=version) for version in (8, 5, 2))
    metrics = batch_metrics(TrainingBatch(10, 1, 10, [fresh, recent, old], 1), 9, recipe(1.0), ["first"])
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 1.0)
    assert metrics["replay/share"] == pytest.approx(2 / 3)
    assert (metrics["replay/age/mean"], metrics["replay/age/max"]) == (5.5, 7.0)


def test_rewards_of_spans_are_those_that_credit_tokens() -> None:
    without = rollout_group([[3], [4]])
    rewarded = rollout_group([[3, 4], [5, 6]], sampled=[[True, True], [True, False]], credit={0: 1.0, 1: 2.0, 2: -1.0})
    batch = TrainingBatch(1, 1, 1, [without, rewarded], 1)

    def found(credit: CreditRecipe | None, batch: TrainingBatch = batch) -> dict[str, float]:
        metrics = batch_metrics(batch, 0, recipe(1.0, credit=credit), ["first"])
        return {name: value for name, value in metrics.items() if name.startswith("spans/")}

    assert found(None) == {}
    steps = {
        "spans/share": 0.5,
        "spans/reward": 2 / 3,
        "spans/reward_std": math.sqrt(7 / 3),
    }  # 1/9 + 16/9 + 25/9, over 2
    assert found(CreditRecipe("per_step")) == pytest.approx(steps)
    turns = {"spans/share": 0.5, "spans/reward": 1.0, "spans/reward_std": math.sqrt(8)}  # the turns are worth 3 and -1
    assert found(CreditRecipe("per_turn")) == pytest.approx(turns)
    assert found(CreditRecipe("per_turn"), TrainingBatch(1, 1, 1, [without], 1)) == {"spans/share": 0.0}


def test_success_by_attempt_is_of_all_scored_completions() -> None:
    counts = {"attempt_1_groups": 2, "attempt_1_scored": 8, "attempt_1_successes": 6, "accepted": 3}
    assert success_rates(counts) == {"success_rate/attempt_1": 0.75}
    again = {"attempt_2_groups": 1, "attempt_2_scored": 4, "attempt_2_successes": 0, "attempt_3_scored": 0}
    assert success_rates(counts | again) == {"success_rate/attempt_1": 0.75, "success_rate/attempt_2": 0.0}


def test_every_step_is_one_line_at_once(tmp_path: Path) -> None:
    counts = Counter(accepted=3)
    place = report(tmp_path / "new" / "run", counts)
    counts["accepted"] += 1
    write(place, 1)
    line = json.loads((tmp_path / "new" / "run" / "steps.jsonl").read_text())  # before anything is closed
    assert line.pop("t") > 1e9
    assert line == {"step": 1, "wait_s": 0.5, "step_s": 1.5, "tokens": 40, "counts": {"accepted": 4}} | METRICS
    place.close()


def test_a_resumed_run_forgets_the_steps_that_the_crash_undid(tmp_path: Path) -> None:
    place = report(tmp_path)
    write(place, 1, 2, 3, 4)
    place.close()
    with (tmp_path / "steps.jsonl").open("a") as stream:
        stream.write('{"step": 5, "t')  # killed while it wrote
    resumed = report(tmp_path, first_step=2)
    write(resumed, 3)
    resumed.close()
    assert steps(tmp_path) == [1, 2, 3]


class Disk:
    """Takes so many more bytes of `os.write`, then says ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.left])
        self.left -= written
        return written


@pytest.mark.parametrize("room", [0, 150])
def test_a_disk_that_fills_up_in_the_middle_of_a_line_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    place = report(tmp_path)
    disk = Disk(monkeypatch)
    write(place, 1)
    disk.left = room
    write(place, 2, 3)
    assert len((tmp_path / "steps.jsonl").read_text().split("\n")[1]) <= room
    disk.left = 7
    write(place, 4)
    disk.left = 10**9
    place.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_elsewhere_than_on_a_terminal_a_step_is_one_readable_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = report(tmp_path, show_bar=True)
    write(place, 1)
    place.close()
    assert capsys.readouterr().err == "step 1/9  reward 0.500  staleness 1.00  tok/s 20  wait 25%\n"


def test_a_step_that_only_teachers_taught_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = report(tmp_path, show_bar=True)
    numbers = {"reward": math.nan, "staleness/mean": 1.0, "distillation/logprob_gain": -0.25}
    place.step(StepRecord(1, numbers, 0.5, 1.5, 40))
    place.close()
    assert capsys.readouterr().err == "step 1/9  teacher -0.250  staleness 1.00  tok/s 20  wait 25%\n"


def test_where_logs_are_json_a_step_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress.logs, "structured", lambda: True)
    caplog.set_level("INFO", logger="consumer")
    place = report(tmp_path, show_bar=True)
    write(place, 1)
    place.say("listening")
    place.close()
    assert caplog.messages == ["step 1/9  reward 0.500  staleness 1.00  tok/s 20  wait 25%", "listening"]
    assert [vars(record)["fields"] for record in caplog.records] == [
        {
            "step": 1,
            "max_steps": 9,
            "reward": 0.5,
            "staleness": 1.0,
            "tokens": 40,
            "tokens_per_s": 20.0,
            "step_s": 1.5,
            "wait_s": 0.5,
            "wait_share": 0.25,
        },
        {},
    ]
