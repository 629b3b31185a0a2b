"""`slipstream inspect` shows what the daemons would make of a prompt, and loads no model."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from consumer.prompts.answers import Answers
from consumer.prompts.dataset import PromptDataset
from protocol.config.run import RunConfig
from protocol.wire.messages import prompt_token_ids
from slipstream.cli import run
from slipstream.inspection import inspected, show
from tests.integration.models import build_model
from tests.unit.consumer.builders import run_config

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1="}], "right": 2, "weights": {"answer": 0}},
    {"prompt": "2+2=", "right": ["4", "four"], "weights": None},
    {"prompt": "3" * 100, "right": None, "weights": None},
    {"prompt": "4+4=", "right": None, "weights": None},
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    model = build_model("llama", tmp_path / "model")
    monkeypatch.setattr("slipstream.run_inputs.RunInputs.model", None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = run_config(tmp_path, model, dataset={"path": str(rows)}).model_dump(exclude_unset=True)
    values["dataset"]["answer_column"] = "right"
    values["sampling"] = {"num_generations": 2, "max_completion_length": 8, "stop": ["\n"], "stop_token_ids": [7]}
    values["engine"] = {"max_model_len": 64}
    return RunConfig.model_validate(values | {"loss": {"ce_coef": 0.1, "weights_column": "weights"}})


def test_tokens_and_answers_are_those_of_the_daemons(config: RunConfig) -> None:
    model = Path(config.model.path)
    found = inspected(config, 9)
    prompts = PromptDataset(config.dataset)
    answers = Answers(config, prompts, model)
    tokenizer = answers._tokenizer
    for prompt_id in (0, 1, 3):
        shown, (prompt, _) = found["prompts"][prompt_id], prompts[prompt_id]
        ids = prompt_token_ids(tokenizer, prompt, {})
        assert [token for token, _ in shown["prompt"]] == ids
        assert shown["text"] == tokenizer.decode(ids)
        answer = answers.of(prompt_id, ids)
        assert [token for token, _ in shown.get("answer", [])] == ([] if answer is None else answer.tolist())
        assert shown["max_completion_length"] == 8
    assert [piece for _, piece in found["prompts"][1]["answer"]] == ["4", tokenizer.eos_token]
    assert "engine.max_model_len=64" in found["prompts"][2]["problem"]
    assert found["prompts"][0]["weights"]["answer"] == 0
    assert len(found["prompts"]) == 4


def test_a_row_may_have_a_limit_of_its_own(config: RunConfig) -> None:
    limited = config.sampling.model_copy(update={"max_completion_length_column": "right"})
    first, second = (
        inspected(config.model_copy(update={"sampling": limited}), 1)["prompts"],
        inspected(config, 1)["prompts"],
    )
    assert (first[0]["max_completion_length"], second[0]["max_completion_length"]) == (2, 8)


def test_what_ends_a_completion(config: RunConfig) -> None:
    tokens = {token for token, _ in inspected(config, 1)["ends"]["tokens"]}
    eos = json.loads((Path(config.model.path) / "config.json").read_text())["eos_token_id"]
    assert tokens == {eos, 7}
    (Path(config.model.path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 9]}))
    assert {token for token, _ in inspected(config, 1)["ends"]["tokens"]} == {eos, 7, 9}
    changed: dict[str, Any] = {"sampling": config.sampling.model_copy(update={"ignore_eos": True})}
    assert [token for token, _ in inspected(config.model_copy(update=changed), 1)["ends"]["tokens"]] == [7]


def test_an_environment_is_named(config: RunConfig, tmp_path: Path) -> None:
    values = config.model_dump(exclude_unset=True) | {"loss": {}, "sampling": {"num_generations": 2}}
    played = RunConfig.model_validate(values | {"environment": {"factory": f"{tmp_path}/maze.py:Maze"}})
    assert [prompt["environment"] for prompt in inspected(played, 2)["prompts"]] == [f"{tmp_path}/maze.py:Maze"] * 2


def test_it_is_shown(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(config, 3)
    found["prompts"][0]["text"] += "\x1b[2J"
    show(found)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    table = [line.split() for line in text.splitlines() if line.endswith(("  no", "  loss.ce_coef"))]
    expected = sum(len(prompt.get(part, ())) for prompt in found["prompts"] for part in ("prompt", "answer"))
    assert len(table) == expected


@pytest.mark.usefixtures("own_logging")
def test_the_command_writes_json(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    assert run(["inspect", "--config", str(file), "--n", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(inspected(config, 2)))
    assert np.shape(found["ends"]["texts"]) == (1,)
