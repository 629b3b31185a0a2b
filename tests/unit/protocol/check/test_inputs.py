"""Files, columns, functions, sizes and packages that a configuration names: looked at, and nothing of them run."""

import gzip
import importlib.util
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from protocol.check.columns import columns_of
from protocol.check.whole import check_file
from protocol.errors import ConfigError, DatasetError, SlipstreamError
from tests.unit.protocol.gpu.models import write_model

RUN = """\
run_dir: run
model:
  path: ./model
dataset:
  path: train.jsonl
rewards:
  functions:
    - function: rewards.py:exact
engine:
  max_model_len: 64
sampling:
  max_completion_length: 8
"""
CODE = """\
raise SystemExit("this file is read and not run")
def exact(completions, answer, **columns): return []
def of_solution(completions, solution, **columns): return []
def without_columns(prompts, completions): return []
def anything(*args, **columns): return []
async def slow(prompts, completions, *, answer, **columns): return []
WEIGHTS = exact
if WEIGHTS:
    from somewhere import imported as brought
class Game:
    def reset(self): ...
def to_prompt(row): return {"prompt": row["question"], "solution": row["answer"]}
def to_two(row, other): return {"prompt": ""}
def to_any(row):
    made = dict(row)
    return made
def is_short(row): return True
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3", "level": 1}\n'
    )
    (tmp_path / "questions.csv").write_text('question,answer\n"one, two",3\n')
    (tmp_path / "rewards.py").write_text(CODE)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def mistakes(*overrides: str) -> tuple[type[SlipstreamError], list[str]]:
    with pytest.raises(SlipstreamError) as caught:
        check_file("run.yaml", list(overrides))
    return type(caught.value), str(caught.value).splitlines()


def test_a_run_whose_inputs_are_here_passes_and_tells_what_was_not_looked_at() -> None:
    assert any("slipstream reward try" in line for line in check_file("run.yaml").not_looked_at)


@pytest.mark.parametrize("overrides", [["lora=null", "model.dtype=bfloat16"], ["engine={}"], ["trainer={}"]])
def test_a_section_of_a_library_may_be_off_or_empty(overrides: list[str]) -> None:
    check_file("run.yaml", overrides)


@pytest.mark.parametrize(
    ("override", "kind", "said"),
    [
        ("model.path=./modle", ConfigError, "did you mean `model`?"),
        ("dataset.path=trian.jsonl", DatasetError, "did you mean `train.jsonl`?"),
        ("dataset.path=elsewhere/train.jsonl", DatasetError, "there is no folder"),
        ("dataset.path=./rewards.py", DatasetError, "must end in one of .jsonl"),
        ("dataset.prompt_column=promt", DatasetError, "did you mean `prompt`?"),
        ("dataset.path=questions.csv", DatasetError, "it has answer, question"),
        ("dataset.answer_column=solution", DatasetError, "no column `solution`"),
        ("dataset.transform=rewards.py:to_promt", ConfigError, "did you mean `to_prompt`?"),
        ("dataset.filter=filters.py:is_short", ConfigError, "there is no file"),
        ("dataset.filter=no_such_module_here:is_short", ConfigError, "there is neither a module"),
        ("dataset.filter=rewards.py:to_two", ConfigError, "must take one argument"),
        ("rewards.functions.0.function=rewards.py:exakt", ConfigError, "did you mean `exact`?"),
        ("rewards.functions.0.function=rewards:exakt", ConfigError, "did you mean `exact`?"),
        ("rewards.functions.0.function=rewards.py:of_solution", ConfigError, "takes `solution`, which no row has"),
        ("environment.factory=rewards.py:Gamee", ConfigError, "did you mean `Game`?"),
        ("sampling.max_completion_length=512", ConfigError, "engine.max_model_len: 64"),
        ("dataset.max_prompt_tokens=60", ConfigError, "lower it to 56"),
        ("engine.max_model_len=100000", ConfigError, "positions of the model"),
        ("lora.target_modules=q_proj", ConfigError, "write [q_proj]"),
        ("lora.target_modules=[q_porj]", ConfigError, "did you mean `q_proj`?"),
        ("lora.task_type=SEQ_CLS", ConfigError, "task_type: SEQ_CLS"),
        ("lora={layers_to_transform: [0]}", ConfigError, "all-linear`, the default"),
        ("trainer.report_to=wandbb", ConfigError, "did you mean `wandb`?"),
        ("lora.init_from=./adapter", ConfigError, "there is no folder"),
        ("loss.weights_column=wight", DatasetError, "no column `wight`"),
        ("sampling.max_completion_length_column=limt", DatasetError, "no column `limt`"),
        ("sft.completion_column=ansr", DatasetError, "did you mean `answer`?"),
        ("model.path=" + "long" * 100, ConfigError, "no model can have this name"),
        ("folder=./nowhere", ConfigError, "there is no folder"),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_named(override: str, kind: type[SlipstreamError], said: str) -> None:
    found, lines = mistakes(override)
    assert found is kind
    assert any(said in line for line in lines), lines
    assert lines[0].startswith((f"--set {override.partition('=')[0]}", "run.yaml:4: dataset.prompt_column: "))


@pytest.mark.parametrize(
    "override",
    [
        "rewards.functions.0.function=rewards.py:anything",
        "rewards.functions.0.function=rewards.py:slow",
        "rewards.functions.0.function=rewards.py:WEIGHTS",
        "rewards.functions.0.function=rewards.py:brought",
        "rewards.functions.0.function=math:sqrt",
        "rewards.functions.0.function=exact_match",
        "dataset.filter=rewards.py:is_short",
        "dataset.transform=rewards.py:to_any",
        "model.path=Qwen/Qwen3-8B",
        "dataset.path=openai/gsm8k",
        "sampling.max_completion_length=63",
        "dataset.max_prompt_tokens=56",
        "lora.target_modules='.*q_proj'",
        "lora.target_modules=[q_proj, nothing]",
        "trainer.report_to=[none]",
        "loss.weights_column=level",
        "dataset.path=" + "long" * 100,
    ],
)
def test_what_may_be_right_passes(override: str) -> None:
    check_file("run.yaml", [override])


def test_more_positions_than_the_model_has_are_the_user_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_file("run.yaml", ["engine.max_model_len=4096", "sampling.max_completion_length=2048"])


def test_columns_are_those_that_a_transform_writes_out() -> None:
    made = ["dataset.path=questions.csv", "dataset.transform=rewards.py:to_prompt"]
    check_file("run.yaml", [*made, "rewards.functions.0.function=rewards.py:of_solution"])
    _, [said] = mistakes(*made)
    assert "takes `answer`, which no row has" in said
    _, [said] = mistakes(*made, "rewards.functions.0.function=exact_match")
    assert "reads the column `answer`" in said
    check_file(
        "run.yaml",
        [*made, "rewards.functions.0={function: exact_match, options: {column: solution}}".replace(".0=", "=[") + "]"],
    )


def test_rows_of_the_evaluation_have_the_columns_too(folder: Path) -> None:
    (folder / "held.jsonl").write_text('{"prompt": "1"}\n')
    _, [said] = mistakes("evaluation={dataset: {path: held.jsonl}}")
    assert "takes `answer`" in said


def test_all_of_it_is_one_round_with_lines_and_the_worst_code() -> None:
    text = RUN.replace("train.jsonl", "trian.jsonl").replace("./model", "./modle").replace(":exact", ":exakt")
    Path("run.yaml").write_text(text + "trainer: {max_step: 3}\n")
    kind, lines = mistakes()
    assert kind is ConfigError
    assert [line.split(": ")[0] for line in lines] == [f"run.yaml:{number}" for number in (3, 5, 8, 13)]


def test_a_file_that_is_no_python_is_named_with_its_line(folder: Path) -> None:
    (folder / "rewards.py").write_text("def exact(completions:\n    pass\n")
    _, [said] = mistakes()
    assert f"{folder}/rewards.py:1: " in said


def test_broken_files_of_the_model_are_named(folder: Path) -> None:
    (folder / "model" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    _, [said, *_] = mistakes()
    assert "model.safetensors" in said


def test_a_model_of_the_hub_of_which_the_cache_has_a_part_is_fetched_by_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    cached = folder / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(folder / "model", cached / "snapshots" / "abc")
    (cached / "snapshots" / "abc" / "tokenizer.json").unlink()
    check_file("run.yaml", ["model.path=org/name"])


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    gone = ("wandb", "bitsandbytes", "galore_torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else there(name))
    _, lines = mistakes("trainer.report_to=wandb", "sft.optim=adamw_8bit")
    assert ["pip install wandb" in lines[0], "bitsandbytes" in lines[1]] == [True, True]


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("rows.jsonl", '{"a": 1}\n\n{"b": 2}\n', {"a", "b"}),
        ("rows.json", '[{"a": 1},\n {"b": [1, "]"]}]', {"a", "b"}),
        ("rows.csv", '\ufeff"a, b",c\n1,2\n', {"a, b", "c"}),
        ("rows.tsv", "a\tb\n1\t2\n", {"a", "b"}),
        ("rows.jsonl", "not json\n", None),
        ("rows.jsonl", "3\n", None),
        ("rows.parquet", "PAR1", None),
        ("rows.jsonl", '{"a": "' + "x" * 2**20 + '"}\n', None),
        ("rows.jsonl", '{"a": 1}\n{"b": "' + "x" * 2**20 + '"}\n', {"a"}),
    ],
)
def test_columns_of_files(tmp_path: Path, name: str, text: str, columns: set[str] | None) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert set(columns_of([tmp_path / name]) or ()) == (columns or set())


def test_a_column_that_later_rows_or_files_have_is_not_missing(tmp_path: Path) -> None:
    first, second = tmp_path / "0.jsonl", tmp_path / "1.jsonl"
    first.write_text('{"a": 1}\n' * 150 + '{"\\u00fc": 2}\n')
    second.write_text('{"c": "b"}\n')
    columns = columns_of([first, second])
    assert columns is not None
    assert [name in columns for name in ("a", "ü", "c", "d")] == [True, True, True, False]
    alone = columns_of([second])
    assert alone is not None
    assert "b" not in alone


def test_a_reward_function_needs_no_keyword_arguments() -> None:
    check_file("run.yaml", ["rewards.functions.0.function=rewards.py:without_columns"])


def test_columns_of_files_that_are_packed_or_saved(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as stream:
        stream.write('{"a": 1}\n')
    assert set(columns_of([tmp_path / "rows.jsonl.gz"]) or ()) == {"a"}
    parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), tmp_path / "rows.parquet")
    assert set(columns_of([tmp_path / "rows.parquet"]) or ()) == {"a", "b"}
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "saved" / "train" / "dataset_info.json").write_text(json.dumps({"features": {"a": {}, "b": {}}}))
    for folder in (tmp_path / "saved", tmp_path / "saved" / "train"):
        assert set(columns_of([folder]) or ()) == {"a", "b"}


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[4] / "examples").glob("*/run.yaml")), ids=lambda file: file.parent.name
)
def test_examples_want_nothing_but_files_that_are_made_first(example: Path) -> None:
    try:
        check_file(str(example))
    except SlipstreamError as error:
        for line in str(error).splitlines():
            assert ".path: there is no " in line or ".model: there is no folder" in line
