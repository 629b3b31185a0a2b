"""What stays of evaluations: lines, the best adapter, and when a run has seen enough; through crashes at any point."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from consumer.evaluate import results as results_module
from consumer.evaluate.results import DueVersion, EvaluationQueue, EvaluationResults
from consumer.link.policy_store import PublishedPolicy
from protocol.config.data import EvaluationSection
from protocol.wire import weight_patch
from protocol.wire.adapter_blob import AdapterBlob, Anchor, pack
from protocol.wire.messages import PolicyInfo, Probe
from protocol.wire.weight_patch import WeightPatch


def section(**values: Any) -> EvaluationSection:
    return EvaluationSection.model_validate({"dataset": {"path": "held-out.jsonl"}} | values)


def blob(version: int) -> tuple[bytes, str]:
    return pack(AdapterBlob(b'{"r": 4}', b"weights of v%d" % version))


def results(folder: Path, *, first_step: int = 10_000, **values: Any) -> EvaluationResults:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return EvaluationResults(folder, folder / "checkpoints", section(**values), first_step, 0.5)


def result(version: int, score: float | None, *, num_scored: int = 4, metric: str = "mean reward") -> dict[str, Any]:
    return {
        "version": version, "step": version * 10, "metric": metric, "score": score, "num_prompts": 4,
        "num_scored": num_scored, "digest": blob(version)[1],
    }  # fmt: skip


def record(kept: EvaluationResults, *scores: float | None, start: int = 1, **values: Any) -> list[bool]:
    return [
        kept.record(result(version, score, **values), blob(version)[0]) for version, score in enumerate(scores, start)
    ]


def best(folder: Path) -> tuple[bytes, int]:
    kept = folder / "checkpoints" / "best"
    assert sorted(file.name for file in kept.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "evaluation.json",
    ]  # fmt: skip
    return (kept / "adapter_model.safetensors").read_bytes(), json.loads((kept / "evaluation.json").read_text())[
        "version"
    ]


def test_what_was_recorded_is_not_kept_in_memory(tmp_path: Path) -> None:
    """One dictionary with a few strings per evaluation, in a run that evaluates for weeks."""
    kept = results(tmp_path)
    recorded = result(1, 0.5)
    kept.record(recorded, blob(1)[0])
    assert not [one for one in gc.get_referrers(recorded) if one is not sys._getframe()]


def test_the_best_adapter_is_kept_and_an_equal_one_does_not_replace_it(tmp_path: Path) -> None:
    kept = results(tmp_path)
    assert kept.best is kept.best_score is None
    assert record(kept, 0.5, 0.75, 0.75, 0.5) == [True, True, False, False]
    assert best(tmp_path) == (b"weights of v2", 2)
    assert (kept.best_score, kept.best and kept.best["version"]) == (0.75, 2)
    assert [line["version"] for line in map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())] == [
        1,
        2,
        3,
        4,
    ]


def test_the_file_of_results_is_bounded_and_what_is_in_it_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "_MAX_BYTES", 1000)
    monkeypatch.setattr(results_module, "_REMEMBERED", 5)
    kept = results(tmp_path)
    record(kept, *[0.5] * 40)
    files = sorted(tmp_path.glob("evaluations*.jsonl"))
    assert [file.name for file in files] == ["evaluations.1.jsonl", "evaluations.jsonl"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert kept.versions == results(tmp_path).versions == [36, 37, 38, 39, 40]
    assert results(tmp_path, first_step=380).versions[-1] == 38


def test_what_does_not_count(tmp_path: Path) -> None:
    kept = results(tmp_path, patience=1)
    assert record(kept, 0.9, num_scored=1) == [False], "of four prompts three have no score"
    assert record(kept, None, start=2, num_scored=0) == [False]
    assert record(kept, 0.9, start=3, metric="pass@1 reward>=0.5") == [False]
    assert (kept.best_score, kept.num_without_improvement, kept.stop_reason) == (None, 0, None)
    assert not (tmp_path / "checkpoints" / "best").exists()


@pytest.mark.parametrize(
    ("scores", "min_delta", "streak"),
    [
        ([0.5], 0.0, 0),
        ([0.5, 0.5], 0.0, 1),
        ([0.5, 0.4, 0.6], 0.0, 0),
        ([0.5, 0.55, 0.59], 0.1, 2),  # creeps up by less than min_delta
        ([0.5, 0.55, 0.66], 0.1, 0),  # more than 0.1 above 0.55
        ([0.5, 0.4, 0.3, 0.2], 0.0, 3),
    ],
)
def test_how_long_nothing_has_improved(tmp_path: Path, scores: list[float], min_delta: float, streak: int) -> None:
    kept = results(tmp_path, patience=3, min_delta=min_delta)
    record(kept, *scores)
    assert kept.num_without_improvement == streak
    again = results(tmp_path, patience=3, min_delta=min_delta)
    assert (again.num_without_improvement, again.stop_reason) == (streak, kept.stop_reason)
    assert (kept.stop_reason is not None) == (streak == 3)
    if kept.stop_reason:
        assert kept.stop_reason == "3 evaluations in a row were no improvement on mean reward 0.5 (evaluation.patience)"


def test_steps_that_are_taken_again_leave_no_lines_and_the_best_stays(tmp_path: Path) -> None:
    record(results(tmp_path), 0.5, 0.9, 0.4)
    kept = results(tmp_path, first_step=10)
    assert kept.versions == [1]
    assert best(tmp_path) == (b"weights of v2", 2)
    assert record(kept, 0.9, start=2) == [False], "as good as what is there"
    assert kept.versions == [1, 2]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_crash_between_the_renames_leaves_a_best_adapter(tmp_path: Path, renamed: bool) -> None:
    record(results(tmp_path), 0.5)
    folder = tmp_path / "checkpoints"
    (folder / "best").rename(folder / ".best.old")
    if renamed:
        record(other := results(tmp_path / "other"), 0.25, 0.9)
        assert other.best
        (tmp_path / "other" / "checkpoints" / "best").rename(folder / "best")
    kept = results(tmp_path)
    assert best(tmp_path)[1] == (2 if renamed else 1)
    assert sorted(file.name for file in folder.iterdir()) == ["best"]
    record(kept, 0.95, start=3)
    assert best(tmp_path) == (b"weights of v3", 3)


def due(version: int) -> DueVersion:
    data, digest = blob(version)
    return DueVersion(PolicyInfo(version, digest, len(data)), version * 10, data, Probe(b"ids!ids!", 2, b"base"))


def queue(folder: Path, first_step: int = 10_000, known: tuple[int, ...] = ()) -> EvaluationQueue:
    result = EvaluationQueue(folder)
    result.restore(first_step, known)
    return result


def test_one_is_evaluated_and_of_the_others_the_newest_waits(tmp_path: Path) -> None:
    waiting = queue(tmp_path)
    assert waiting.begin() is None
    waiting.put(due(2))
    assert waiting.begin() == due(2)
    for version in (4, 6, 8):
        waiting.put(due(version))
    assert (waiting.versions, waiting.num_skipped, waiting.next) == ([2, 8], 2, due(8))
    assert waiting.begin() is None, "the first is not done"
    assert queue(tmp_path).versions == [2, 8], "as the next process finds it"
    waiting.done(2)
    assert waiting.begin() == due(8)
    assert waiting.next is None
    waiting.done(8)
    assert (waiting.versions, list((tmp_path / "evaluation").iterdir())) == ([], [])


def test_an_evaluation_begins_without_a_file_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue(tmp_path).put(due(2))
    waiting = queue(tmp_path)
    waiting.put(due(4))
    with monkeypatch.context() as patched:
        patched.delattr(Path, "open")
        assert waiting.begin() == due(2)
        waiting.done(2)
        assert waiting.begin() == due(4)
    assert not waiting._waiting, "what has begun is held by whoever evaluates it"


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "evaluation" / "folder").mkdir(parents=True)
    (tmp_path / "evaluation" / "mine.adapter").write_bytes(b"")
    queue(tmp_path).put(due(2))
    assert queue(tmp_path).versions == [2]
    assert sorted(file.name for file in (tmp_path / "evaluation").iterdir()) == [
        "folder", "mine.adapter", "version-2-step-20.adapter",
    ]  # fmt: skip


def test_the_next_process_takes_up_what_is_left(tmp_path: Path) -> None:
    waiting = queue(tmp_path)
    for version in (2, 4):
        waiting.put(due(version))
    (tmp_path / "evaluation" / ".version-9-step-90.adapter.partial").write_bytes(b"half")
    assert queue(tmp_path, first_step=20).versions == [2], "step 40 will be taken again"
    waiting = queue(tmp_path)
    waiting.put(due(4))
    assert queue(tmp_path, known=(2,)).versions == [4]
    waiting = queue(tmp_path)
    waiting.put(due(4))
    assert waiting.versions == [4], "published once more by the process that resumed"
    assert [file.name for file in (tmp_path / "evaluation").iterdir()] == ["version-4-step-40.adapter"]


def test_a_patch_is_due_and_kept_with_its_anchor(tmp_path: Path) -> None:
    below, anchor = weight_patch.pack(WeightPatch("", [], [b""] * 4))
    data, digest = weight_patch.pack(WeightPatch(anchor, [], [b""] * 4))
    queue(tmp_path).put(DueVersion(PolicyInfo(4, digest, len(data)), 40, data, anchor=(anchor, below)))
    [file] = (tmp_path / "evaluation").iterdir()
    written = file.read_bytes()
    assert written[8 + int.from_bytes(written[:8], "little") :] == data + below, "msgpack has no bytes of 4 GiB"
    due = queue(tmp_path).begin()
    assert due is not None
    assert due.published == PublishedPolicy(
        4, digest, data, anchor=Anchor(anchor, below), release=due.published.release
    )
    kept = EvaluationResults(tmp_path, tmp_path / "checkpoints", section(), 10_000, 0.5, weight_patch.unpack)
    assert kept.record(result(4, 0.5) | {"digest": digest}, due.blob, anchor=due.published.anchor)
    best = tmp_path / "checkpoints" / "best"
    assert [each.anchor for each in weight_patch.read(best, None)] == ["", anchor]
    assert kept.record(result(5, 0.75) | {"digest": anchor}, below)
    assert sorted(file.name for file in best.iterdir()) == ["evaluation.json", weight_patch.FILE]
