"""Files and folders of rows whose paths look like patterns, or like places on a network."""

from pathlib import Path

import datasets
import pytest

from consumer.prompts.dataset import PromptDataset
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError

NAMES = ["run [a]*{x}%41", "[!a]", "a]b[c", "q?x#y", "~t", "$NO_SUCH_VARIABLE", "file:__x", "50% {}", "'\"`\\", "**"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def answers(path: Path) -> list[str]:
    prompts = PromptDataset(DatasetSection(path=str(path)))
    return [prompts[number][1]["answer"] for number in range(len(prompts))]


def written(folder: Path, name: str, answer: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f'{{"prompt": "p", "answer": "{answer}"}}\n')
    return file


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_path_names_one_place_whatever_characters_it_has(tmp_path: Path, name: str) -> None:
    written(tmp_path / "run a41", "rows[1]*.jsonl", "of another")  # it fits the pattern
    file = written(tmp_path / name, "rows[1]*.jsonl", "mine")
    written(tmp_path / name, "rows1.jsonl", "of another file")
    assert answers(file) == ["mine"]
    for number in (1, 2):
        written(tmp_path / name / "more", f"part-{number}.jsonl", str(number))
    assert answers(tmp_path / name / "mo*" / "part-*.jsonl") == ["1", "2"]
    saved = tmp_path / name / "saved"
    datasets.Dataset.from_list([{"prompt": "p", "answer": "saved"}]).save_to_disk(saved)
    assert answers(saved) == ["saved"]


def test_a_path_that_datasets_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset\.path: .*a::b.*rename"):
        answers(written(tmp_path / "a::b", "rows.jsonl", "a"))
    with pytest.raises(DatasetError, match=r"dataset\.path: .*\$HOME.*rename"):
        answers(written(tmp_path / "$HOME", "rows.jsonl", "a"))
    with pytest.raises(DatasetError, match=r"dataset\.path: .*\[a\].*name the files"):
        answers(written(tmp_path / "[a]", "rows.jsonl", "a").parent)
