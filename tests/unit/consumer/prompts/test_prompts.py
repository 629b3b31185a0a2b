"""Every form of dataset gives prompts and columns; what cannot is refused with the place and the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.dataset import PromptDataset, open_prompts
from protocol.config.data import DatasetSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DatasetError, ExitCode
from tests.unit.consumer.builders import run_config

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+3=", "answer": 5}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def opened(path: Path | str, **options: Any) -> PromptDataset:
    return PromptDataset(DatasetSection(path=str(path), **options))


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(path: Path | str, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        opened(path, **options)
    assert caught.value.exit_code == ExitCode.DATASET == 65
    return str(caught.value)


WRITERS: dict[str, Callable[[Path], object]] = {
    "train.jsonl": lambda path: jsonl(path, *ROWS),
    "train.json": lambda path: path.write_text(json.dumps(ROWS)),
    "train.csv": lambda path: path.write_text("prompt,answer\n1+1=,2\n2+3=,5\n"),
    "train.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(str(path)),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(str(path)),
    "splits": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    prompts = opened(tmp_path / name)
    assert len(prompts) == 2
    answers = ("2", "5") if name == "train.csv" else (2, 5)
    assert [prompts[i] for i in range(2)] == [("1+1=", {"answer": answers[0]}), ("2+3=", {"answer": answers[1]})]


def test_columns_that_the_prompt_of_a_teacher_names_must_be_there(tmp_path: Path) -> None:
    teacher = {"name": "self", "prompt": "{prompt} is {answer}"}

    def with_teacher(**changes: str) -> RunConfig:
        values = run_config(tmp_path, dataset={"path": str(jsonl(tmp_path / "rows.jsonl", *ROWS))}).model_dump(
            exclude_unset=True
        )
        return RunConfig.model_validate(
            values | {"teachers": [teacher | changes], "distillation": {"mode": "advantage"}}
        )

    assert len(open_prompts(with_teacher(), tmp_path, lambda: None)) == 2
    with pytest.raises(
        DatasetError, match=r"teachers\.0\.prompt: .*rows\.jsonl has no column 'right'; it has 'answer'"
    ):
        open_prompts(with_teacher(prompt="{right}"), tmp_path, lambda: None)


def test_the_column_of_limits_must_be_there(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", *ROWS))
    values = run_config(tmp_path, dataset={"path": path}).model_dump(exclude_unset=True)
    values["sampling"] |= {"max_completion_length_column": "answer"}
    assert len(open_prompts(RunConfig.model_validate(values), tmp_path, lambda: None)) == 2
    values["sampling"]["max_completion_length_column"] = "limit"
    with pytest.raises(DatasetError, match=r"max_completion_length_column: .* has no column 'limit'"):
        open_prompts(RunConfig.model_validate(values), tmp_path, lambda: None)


def test_another_split_of_a_saved_dataset(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[1:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert opened(tmp_path / "saved", split="test")[0] == ("2+3=", {"answer": 5})
    assert "Unknown split \"dev\". Should be one of ['train', 'test']" in refused(tmp_path / "saved", split="dev")


def test_a_part_of_a_split(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", *ROWS)
    assert opened(path, split="train[1:]")[0] == ("2+3=", {"answer": 5})
    assert len(opened(path, max_rows=1)) == 1
    assert len(opened(path, max_rows=9)) == 2


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_stream_gives_its_first_rows_at_every_start(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    streams = [opened(tmp_path / name, streaming=True, max_rows=count) for count in (1, 1, 5)]
    assert [len(prompts) for prompts in streams] == [1, 1, 2]
    assert streams[2][1] == ("2+3=", {"answer": 5})
    assert streams[0].digest == streams[1].digest != streams[2].digest == opened(tmp_path / name).digest


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "elsewhere").mkdir()
    jsonl(tmp_path / "elsewhere" / "b.jsonl", *ROWS)
    jsonl(tmp_path / "c.jsonl", ROWS[0], ROWS[1] | {"answer": 6})
    digests = [opened(tmp_path / name).digest for name in ("a.jsonl", "elsewhere/b.jsonl", "c.jsonl")]
    assert digests[0] == digests[1] != digests[2]


def test_several_sources_with_weights(tmp_path: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", *({"prompt": f"{i}+1=", "answer": i + 1} for i in range(6)))
    few = jsonl(tmp_path / "few.jsonl", {"question": "2*3=", "hint": "six"}, {"question": "2*2=", "hint": "four"})
    sources = [{"path": str(many), "weight": 2.0}, {"path": str(few), "prompt_column": "question", "weight": 1.0}]
    prompts = PromptDataset(DatasetSection(sources=sources))
    assert len(prompts) == 9  # six of the one, and half as many of the other
    assert [prompts[i][0] for i in range(9)] == [f"{i}+1=" for i in range(6)] + ["2*3=", "2*2=", "2*3="]
    assert prompts[7] == ("2*2=", {"hint": "four"})
    plain = PromptDataset(DatasetSection(sources=[source | {"weight": None} for source in sources]))
    assert len(plain) == 8
    assert plain.digest != prompts.digest


def test_a_mistake_in_one_source_names_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", *ROWS)
    with pytest.raises(DatasetError, match=r"dataset.sources\[1\].path: there is no file .*absent.jsonl"):
        PromptDataset(DatasetSection(sources=[{"path": str(path)}, {"path": "absent.jsonl"}]))


def test_weights_that_would_make_an_endless_epoch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer.prompts.dataset.MOST_PROMPTS", 100)
    path = str(jsonl(tmp_path / "train.jsonl", *ROWS))
    with pytest.raises(DatasetError, match="an epoch has 202 prompts, because every row comes at least once"):
        PromptDataset(
            DatasetSection(sources=[{"path": path, "name": "one", "weight": 1}, {"path": path, "weight": 100}])
        )


def test_messages_and_nested_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    path = jsonl(tmp_path / "train.jsonl", {"chat": messages, "tests": [{"in": "1", "out": [1, 2]}]})
    assert opened(path, prompt_column="chat")[0] == (messages, {"tests": [{"in": "1", "out": [1, 2]}]})


@pytest.mark.usefixtures("transformed_here")
def test_a_transform_makes_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def to_prompt(row):\n    return {'prompt': row['question'] + '=', 'n': 1}\n")
    path = jsonl(tmp_path / "train.jsonl", {"question": "1+1"})
    assert opened(path, transform=f"{tmp_path}/task.py:to_prompt")[0] == ("1+1=", {"n": 1})
    with pytest.raises(ConfigError, match=r"dataset.transform: .*has no `absent`"):
        opened(path, transform=f"{tmp_path}/task.py:absent")


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    assert refused("absent.jsonl") == f"dataset.path: there is no file {Path('absent.jsonl').absolute()}"


def test_another_suffix(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1+1=\n")
    assert refused(tmp_path / "train.txt").endswith(
        "train.txt must end in one of .jsonl, .json, .csv, .tsv, .parquet, .arrow"
    )


def test_a_broken_file_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n{broken\n')
    assert "train.jsonl, line 2: Expecting property name" in refused(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.csv", ""), ("d.csv", "prompt,answer\n"), ("e.json", "[]")],
)
def test_no_rows(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert refused(tmp_path / name) == f"dataset.path: {tmp_path / name}, split train, has no rows"


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", {"question": "1+1=", "answer": 2})
    assert refused(path) == f"dataset.prompt_column: {path} has no column 'prompt'; it has 'question', 'answer' (row 0)"


@pytest.mark.parametrize("prompt", ["", None, 7, [], ["1+1="], [{"role": "user"}]])
def test_a_row_without_a_usable_prompt_is_refused_by_its_number(tmp_path: Path, prompt: Any) -> None:
    path = jsonl(tmp_path / "train.jsonl", {"prompt": prompt})
    assert f"row 0 of {path}: 'prompt' must be a string that is not empty, or a list of messages" in refused(path)


def test_a_row_with_an_image_is_refused(tmp_path: Path) -> None:
    def row(*parts: dict[str, str]) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": list(parts)}]}

    text, image = {"type": "text", "text": "1"}, {"type": "image", "text": "a.png"}
    said = "a message of 'prompt' has a part of type 'image'; prompts are text, also those of vision-language models"
    assert f"row 0 of {tmp_path}/train.jsonl: {said}" in refused(
        jsonl(tmp_path / "train.jsonl", row(text, image), row(text))
    )
    prompts = opened(jsonl(tmp_path / "later.jsonl", row(text), row(text, image)))
    assert prompts[0][0] == row(text)["prompt"]
    with pytest.raises(DatasetError, match="row 1 of"):
        prompts[1]
