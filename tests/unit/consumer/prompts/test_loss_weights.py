"""Weights of the parts of the loss from rows: numbers by hand, and rows that have none that are usable."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.dataset import Placeholders, PromptDataset
from consumer.prompts.loss_weights import LossWeights, weights_of
from protocol.errors import DatasetError
from replay.batch_selection import TrainingBatch
from tests.unit.consumer.builders import rollout_group, run_config


@pytest.fixture
def weights(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LossWeights]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def made(*sources: list[Any], column: str = "parts") -> LossWeights:
        given = []
        for number, values in enumerate(sources):
            rows = [{"prompt": f"{row}+1=", "parts": value} for row, value in enumerate(values)]
            given.append({"path": str(tmp_path / f"{number}.jsonl")})
            Path(given[-1]["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = run_config(tmp_path, tiny_model, dataset={"path": None, "sources": given})
        return LossWeights(column, PromptDataset(config.dataset))

    return made


def found(weights: LossWeights, *prompt_ids: int) -> list[tuple[float, ...]]:
    groups = [rollout_group([[3], [4]], lease_id=f"0-{number}-0-1-s") for number in prompt_ids]
    return list(weights.add_to(TrainingBatch(1, 1, 1, groups, len(groups))).weights)


def test_weights_by_hand(weights: Callable[..., LossWeights]) -> None:
    read = weights([{"rewards": 0, "answer": 2}, {"teacher": 0.5}, None])
    assert found(read, 1, 0, 2, 0) == [(1, 0.5, 1), (0, 1, 2), (1, 1, 1), (0, 1, 2)]


def test_a_row_without_usable_weights_trains_nothing_and_is_named_once(
    weights: Callable[..., LossWeights], caplog: pytest.LogCaptureFixture
) -> None:
    read = weights([{"rewards": 1.0}, {"rewards": -1.0}, {"rewards": -2.0}])
    with caplog.at_level(logging.WARNING):
        assert found(read, 0, 1, 2) == [(1, 1, 1), (0, 0, 0), (0, 0, 0)]
    [record] = caplog.records
    assert "row 1 of" in record.getMessage()


def test_the_first_row_of_each_source_is_checked_at_the_start(weights: Callable[..., LossWeights]) -> None:
    with pytest.raises(DatasetError, match=r"row 0 of .*1\.jsonl"):
        weights([{"rewards": 1}], [{"reward": 1}])
    with pytest.raises(DatasetError, match="'other'"):
        weights([{"rewards": 1}], column="other")
    LossWeights("parts", Placeholders())


@pytest.mark.parametrize(
    "value", [1, "rewards", [1, 1, 1], {"reward": 1}, {"answer": "1"}, {"answer": True}, {"teacher": -0.1},
              {"teacher": float("nan")}, {"rewards": float("inf")}],
)  # fmt: skip
def test_what_is_no_weight_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"rewards|answer|teacher"):
        weights_of(value)
