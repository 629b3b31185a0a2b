"""The JSON schema of a configuration file, against the loader: both take, or refuse, the same files."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from protocol.config.loader import load_config
from protocol.config.schema import FILE, json_schema
from protocol.errors import ConfigError
from tests.unit.protocol.config.files import MINIMAL

REPOSITORY = Path(__file__).parents[4]
EXAMPLES = sorted((REPOSITORY / "examples").glob("**/*.yaml"))
TAKEN = [
    "engine:",
    "evaluation: null",
    "environment: game.py:Game",
    "environment: {factory: game.py:Game, max_turns: 3}",
    "sampling: {num_generations: 4, temperature: 0.7, stop: [END]}",
    "pipeline: {trainer_tokens_per_micro_batch: auto}",
    "pipeline: {trainer_tokens_per_micro_batch: 4096}",
    "trainer: {learning_rate: 1e-5, lr_scheduler_kwargs: {num_cycles: 2}}",
    "evaluation: {dataset: {path: eval.jsonl}, every_versions: 10}",
    "{teachers: [{name: big, url: 'http://h:8000'}], distillation: {mode: advantage}}",
    "{teachers: [{name: self, prompt: 'In short: {prompt} {solution}'}], distillation: {mode: advantage, alone: true}}",
    "{dataset: {path: train.jsonl, answer_column: answer}, loss: {ce_coef: 0.1}}",
]
REFUSED = [
    "pipelines: {}",
    "pipeline: {max_stalenes: 1}",
    "pipeline: {max_staleness: -1}",
    "pipeline: {max_staleness: 65}",
    "pipeline: {max_staleness: true}",
    "pipeline: {groups_per_step: many}",
    "pipeline: {gpu: alone}",
    "sampling: {num_generations: 0}",
    "sampling: {top_p: 1.5}",
    "sampling: {stop: END}",
    "sampling: 8",
    "lora: [16]",
    "run_dir:",
    "seed: -1",
    "evaluation: {every_versions: 10}",
    "evaluation: {dataset: {path: eval.jsonl}, every_versions: 0}",
]


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.long
@pytest.mark.parametrize("text", [*TAKEN, *REFUSED])
def test_schema_and_loader_judge_alike(text: str, validator: Any, tmp_path: Path) -> None:
    values = yaml.safe_load(MINIMAL) | yaml.safe_load(text)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    try:
        load_config(str(tmp_path / "run.yaml"))
        is_taken = True
    except ConfigError:
        is_taken = False
    assert (is_taken, validator.is_valid(values)) == (text in TAKEN, text in TAKEN)


@pytest.mark.parametrize("key", ["run_dir", "model"])
def test_what_is_required_is_missed(key: str, validator: Any) -> None:
    values = {name: value for name, value in yaml.safe_load(MINIMAL).items() if name != key}
    assert not validator.is_valid(values)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_names_the_schema_and_fits_it(path: Path, validator: Any) -> None:
    text = path.read_text()
    assert (path.parent / text.splitlines()[0].partition("$schema=")[2]).resolve() == FILE
    validator.validate(yaml.safe_load(text))


def test_the_file_of_the_package_is_current() -> None:
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(json_schema()))
