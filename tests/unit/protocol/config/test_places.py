"""The paths of a configuration file begin in its folder, wherever it is loaded."""

from pathlib import Path

import pytest

from protocol.config.loader import load_config, write_resolved
from protocol.config.places import working_in
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

FILE = """\
run_dir: runs/x
model:
  path: base
dataset:
  sources:
    - {path: data/train.jsonl, transform: "task.py:to_prompt"}
    - {path: openai/gsm8k, filter: "tasks.easy:keep"}
rewards:
  functions:
    - function: rewards.py:exact
    - function: exact_match
    - {function: code, options: {python: venv/bin/python}}
    - model: ./judge
    - {function: feature_matching, options: {model: ./features}}
environment: environment.py:Shop
evaluation:
  dataset: {path: held-out.parquet}
transport:
  keys: keys
serve:
  api_key_file: ~/serve.key
engine_server:
  url: http://127.0.0.1:8000
  adapter_dir: adapters
  key_file: server.key
teachers:
  - {name: big, url: "http://127.0.0.1:8001", key_file: teacher.key}
distillation: {mode: advantage}
lora:
  init_from: runs/sft
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the file; the working directory is another one."""
    folder = tmp_path / "task"
    for name in ("task/base", "task/runs/sft", "elsewhere/other"):
        (tmp_path / name).mkdir(parents=True)
    (folder / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", "/home/me")
    return folder


def load(task: Path, *overrides: str) -> RunConfig:
    return load_config(str(task / "run.yaml"), list(overrides))


def places(config: RunConfig) -> list[str | None]:
    functions, sources, server = config.rewards.functions, config.dataset.sources, config.engine_server
    assert config.evaluation is not None
    assert server is not None
    return [
        config.run_dir, config.model.path, sources[0].path, sources[0].transform, functions[0].function,
        functions[2].options["python"], functions[3].model, functions[4].options["model"],
        config.environment.factory, config.evaluation.dataset.path,
        config.transport.keys, config.serve.api_key_file, server.adapter_dir, server.key_file, config.lora_section["init_from"],
        config.teachers[0].key_file,
    ]  # fmt: skip


def test_every_path_of_a_file_begins_in_its_folder(task: Path) -> None:
    names = [
        "runs/x", "base", "data/train.jsonl", "task.py:to_prompt", "rewards.py:exact", "venv/bin/python", "judge", "features",
        "environment.py:Shop", "held-out.parquet", "keys", "/home/me/serve.key", "adapters", "server.key", "runs/sft",
        "teacher.key",
    ]  # fmt: skip
    config = load(task)
    assert places(config) == [str(task / name) for name in names]
    assert config.folder == str(task)


def test_names_of_hub_plugin_and_module_stay(task: Path) -> None:
    (task / "run.yaml").write_text(FILE.replace("path: base", "path: Qwen/Qwen2.5-0.5B-Instruct"))
    config = load(task)
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.dataset.sources[1].path == "openai/gsm8k"
    assert config.dataset.sources[1].filter == "tasks.easy:keep"
    assert config.rewards.functions[1].function == "exact_match"


def test_paths_of_the_command_line_begin_in_the_working_directory(task: Path) -> None:
    config = load(task, "run_dir=mine", "model.path=other", "dataset.sources.0.path=train.csv")
    here = Path.cwd()
    assert (config.run_dir, config.model.path) == (str(here / "mine"), str(here / "other"))
    assert config.dataset.sources[0].path == str(here / "train.csv")
    assert config.dataset.sources[0].transform == f"{task}/task.py:to_prompt"
    assert (
        load(task, "rewards.functions=[{function: 'mine.py:f'}]").rewards.functions[0].function == f"{here}/mine.py:f"
    )


def test_another_folder_may_be_named(task: Path) -> None:
    assert load(task, "folder=..").folder == str(task.parent)
    (task / "run.yaml").write_text(f"folder: ..\n{FILE}")
    config = load(task)
    assert (config.folder, config.run_dir) == (str(task.parent), str(task.parent / "runs/x"))
    with pytest.raises(ConfigError, match="none"), working_in(load(task, "folder=none").folder):
        pass


def test_the_file_in_the_runs_folder_names_the_same_places(task: Path) -> None:
    config = load(task)
    Path(config.run_dir).mkdir()
    write_resolved(config)
    again = load_config(f"{config.run_dir}/resolved.yaml")
    assert places(again) == places(config)
    assert again.folder == str(task)
