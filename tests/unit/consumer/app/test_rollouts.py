"""The sections replay, reroll, pipeline and rewards reach the rollout buffer of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.app.wiring import rollout_buffer
from protocol.errors import ConfigError
from replay.buffer import RolloutBuffer
from replay.rewards import RewardRecipe
from replay.sources import ONE, Sources
from replay.staleness import StalenessBudget
from tests.unit.consumer.builders import delivery, rollout_group, run_config
from tests.unit.replay.builders import FillableJournal

FORMAT_AND_ANSWER = {
    "functions": [{"function": "rewards:format", "weight": 0.1}, {"function": "rewards:answer", "weight": 1.0}]
}
NOBODY = [[1.0, 0.0]] * 4  # every completion has the format, none the answer
SOME = [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
ALL = [[1.0, 1.0]] * 4


class Six:
    """Prompts of one source, or of two."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return 6

    def environment_of(self, prompt_id: int) -> str:
        return ""


def buffer_of(folder: Path, journal: FillableJournal, **sections: Any) -> RolloutBuffer:
    config = run_config(folder, **{"rewards": FORMAT_AND_ANSWER, "dataset": {"shuffle": False}} | sections)
    budget = StalenessBudget(config.pipeline.groups_per_step, config.pipeline.max_staleness)
    recipe = RewardRecipe.of(config, "sum_then_normalize", "group")
    names = config.dataset.source_names
    sources = Sources.of(names, [3] * len(names)) if names else ONE
    setup: Any = SimpleNamespace(config=config, prompts=Six(sources), budget=budget, rewards=recipe)
    result = rollout_buffer(setup, journal, "s")
    result.published(0)
    return result


def answer(buffer: RolloutBuffer, rewards: list[list[float]], version: int = 0) -> tuple[str, str]:
    """Leases a prompt and answers it. Returns the start of the lease id (epoch, prompt, return) and the outcome."""
    record = buffer.lease("p", now=0.0, timeout_s=60.0)
    assert record is not None
    group = rollout_group([[3], [4], [5], [6]], rewards=rewards, lease_id=record.lease_id, version=version)
    (outcome,) = buffer.offer([delivery(group)])
    return "-".join(record.lease_id.split("-")[:3]), outcome


def test_a_constant_format_reward_does_not_hide_a_failure_and_the_prompt_returns_to_a_newer_policy(
    tmp_path: Path, journal: FillableJournal
) -> None:
    reroll = {"reward": "answer", "delay_versions": 2, "max_share": 0.5}
    buffer = buffer_of(tmp_path, journal, reroll=reroll, pipeline={"max_staleness": 4})
    assert answer(buffer, NOBODY) == ("0-0-0", "no_signal")
    assert answer(buffer, ALL) == ("0-1-0", "no_signal")
    buffer.published(1)
    assert answer(buffer, ALL)[0] == "0-2-0", "one version is too early"
    buffer.published(2)
    assert answer(buffer, SOME, version=2) == ("0-0-1", "accepted")
    assert [buffer.totals[name] for name in ("deferred", "rerolls_leased")] == [1, 1]
    assert [buffer.totals[f"attempt_1_{name}"] for name in ("groups", "scored", "successes")] == [3, 12, 8]
    assert [buffer.totals[f"attempt_2_{name}"] for name in ("groups", "scored", "successes")] == [1, 4, 2]


def test_a_level_that_is_solved_opens_the_next(tmp_path: Path, journal: FillableJournal) -> None:
    sources = [{"path": f"{level}.jsonl", "level": level} for level in (0, 1)]
    dataset = {"path": None, "sources": sources, "curriculum": {"window": 2, "up": 0.75}, "shuffle": False}
    reroll = {"reward": "answer", "max_attempts": 0}
    buffer = buffer_of(tmp_path, journal, dataset=dataset, reroll=reroll)
    assert [answer(buffer, each)[0] for each in (SOME, ALL)] == ["0-0-0", "0-1-0"]  # 6 of 8
    assert [answer(buffer, SOME)[0] for _ in range(2)] == ["0-2-0", "1-3-0"]  # this epoch was decided on before
    batch = buffer.next_batch(0.0)
    assert batch is not None
    assert batch.curriculum is not None
    assert batch.curriculum.level == 1


def test_without_a_name_the_first_function_judges(tmp_path: Path, journal: FillableJournal) -> None:
    buffer = buffer_of(tmp_path, journal, reroll={"delay_versions": 1, "max_share": 0.5})
    answer(buffer, NOBODY)
    assert buffer.totals["deferred"] == 0, "all of them have the format"


def test_a_solved_prompt_rests(tmp_path: Path, journal: FillableJournal) -> None:
    buffer = buffer_of(tmp_path, journal, reroll={"solved_cooldown_epochs": 1, "reward": "answer"})
    assert [answer(buffer, ALL if prompt < 4 else NOBODY)[0] for prompt in range(6)] == [
        f"0-{prompt}-0" for prompt in range(6)
    ]
    assert [answer(buffer, NOBODY)[0] for _ in range(2)] == ["1-4-0", "1-5-0"]
    assert answer(buffer, ALL)[0] == "2-0-0"


def test_groups_are_replayed_for_those_without_signal_within_their_share(
    tmp_path: Path, journal: FillableJournal
) -> None:
    replay = {"mode": "signal", "min_size": 1, "max_share": 0.5}
    buffer = buffer_of(tmp_path, journal, replay=replay, pipeline={"max_staleness": 4, "fill": "full"})
    for rewards in (SOME, SOME, ALL):
        answer(buffer, rewards)
    first = buffer.next_batch(0.0)
    assert first is not None
    assert (len(first.groups), first.num_fresh) == (2, 2)
    assert buffer.next_batch(0.0) is None, "half of a batch is fresh"
    answer(buffer, SOME)
    second = buffer.next_batch(0.0)
    assert second is not None
    assert (len(second.groups), second.num_fresh) == (2, 1)
    assert second.groups[1].lease_id in {group.lease_id for group in first.groups}
    answer(buffer, SOME)
    assert buffer.next_batch(0.0) is None, "one group had no signal, and one was replayed for it"


@pytest.mark.parametrize("fill", ["sampled", "full"])
def test_groups_without_signal_count_for_a_sampled_batch(tmp_path: Path, journal: FillableJournal, fill: str) -> None:
    buffer = buffer_of(tmp_path, journal, pipeline={"groups_per_step": 3, "max_staleness": 3, "fill": fill})
    for rewards in (SOME, NOBODY, SOME):
        assert buffer.next_batch(0.0) is None
        answer(buffer, rewards)
    batch = buffer.next_batch(0.0)
    assert (batch is not None) == (fill == "sampled")
    assert batch is None or len(batch.groups) == 2


def test_a_penalty_for_length_is_a_signal(tmp_path: Path, journal: FillableJournal) -> None:
    buffer = buffer_of(tmp_path, journal, advantage={"overlong_buffer_tokens": 2})
    record = buffer.lease("p", now=0.0, timeout_s=60.0)
    assert record is not None
    group = rollout_group([[3], [4], [5], [6] * 6], rewards=ALL, lease_id=record.lease_id)
    assert buffer.offer([delivery(group)]) == ["accepted"]


def test_settings_with_which_nothing_could_ever_be_replayed_are_refused(
    tmp_path: Path, journal: FillableJournal
) -> None:
    with pytest.raises((ConfigError, ValueError), match="min_size"):
        buffer_of(tmp_path, journal, replay={"mode": "signal", "min_size": 9, "max_size": 8})
