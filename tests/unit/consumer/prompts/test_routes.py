"""Rows of several environments: who plays a row, and names that are refused with the row and the value."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from consumer.prompts.dataset import PromptDataset, open_prompts
from protocol.config.data import DatasetSection
from protocol.errors import DatasetError
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.prompts.test_prompts import jsonl

KNOWN = ("single_turn", "shop", "maze")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def row(name: str | None = None, **columns: Any) -> dict[str, Any]:
    return {"prompt": "1+1=", "environment": name} | columns


def routed(*sources: dict[str, Any], environments: tuple[str, ...] = KNOWN) -> PromptDataset:
    named = [{"name": f"source-{number}"} | source for number, source in enumerate(sources)]
    return PromptDataset(DatasetSection.model_validate({"sources": named}), environments=environments)


def test_a_source_or_the_column_of_a_row_names_the_environment(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "plain.jsonl", {"prompt": "a"}, {"prompt": "b"})
    mixed = jsonl(tmp_path / "mixed.jsonl", row("maze"), row(None), row("shop"))
    prompts = routed({"path": str(plain), "environment": "shop"}, {"path": str(mixed)}, {"path": str(plain)})
    names = [prompts.environment_of(number) for number in range(len(prompts))]
    assert names == ["shop", "shop", "maze", "single_turn", "shop", "single_turn", "single_turn"]
    assert [prompts[number][1]["environment"] for number in range(len(prompts))] == names
    assert prompts.environments == {"shop", "maze", "single_turn"}
    assert prompts.sources.environments.names == ("maze", "shop", "single_turn")
    assert prompts.sources.environments.name_of(2) == "maze"
    assert routed({"path": str(plain), "environment": "shop"}).sources.environments.names == (), "one alone"
    assert prompts.digest == routed({"path": str(plain)}, {"path": str(mixed)}, {"path": str(plain)}).digest


def test_an_empty_cell_names_no_environment(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,environment\na,maze\nb,\n")
    prompts = routed({"path": str(tmp_path / "rows.csv")})
    assert [prompts.environment_of(number) for number in range(2)] == ["maze", "single_turn"]


@pytest.mark.long
def test_rows_that_a_transform_made_and_rows_that_a_filter_left(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "def made(row):\n    return row | {'environment': row['kind']}\n\ndef kept(row):\n    return row['kind'] != 'shop'\n"
    )
    path = jsonl(tmp_path / "rows.jsonl", *({"prompt": "a", "kind": kind} for kind in ("shop", "maze", "single_turn")))
    prompts = routed({"path": str(path), "transform": f"{tmp_path}/rows.py:made", "filter": f"{tmp_path}/rows.py:kept"})
    assert [prompts.environment_of(number) for number in range(len(prompts))] == ["maze", "single_turn"]


def test_without_several_environments_the_column_is_the_user_s_own(tmp_path: Path) -> None:
    prompts = routed({"path": str(jsonl(tmp_path / "a.jsonl", row("anything")))}, environments=())
    assert prompts[0][1] == {"environment": "anything"}
    assert (prompts.environment_of(0), prompts.environments) == ("", set())


@pytest.mark.parametrize(
    ("rows", "given", "said"),
    [
        ([row("maze"), row("mze")], None, "dataset.sources[0]: row 1"),
        ([row("maze"), row("mze")], None, "'mze', which is not one of single_turn, shop, maze"),
        ([row(), row(5)], None, "is 5, which"),
        ([row("maze")], "shop", "dataset.sources[0].environment is 'shop'"),
        ([row("maze")], "shop", "is 'maze'; remove one"),
    ],
)  # fmt: skip
def test_a_row_that_names_no_environment_is_refused_at_the_start(
    tmp_path: Path, rows: list[dict[str, Any]], given: str | None, said: str
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DatasetError) as caught:
        routed({"path": str(path), "environment": given})
    assert said in str(caught.value)


def test_an_environment_that_no_row_names_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", row("shop"))
    several = [{"name": name, "factory": "a:A"} for name in ("shop", "maze")]
    config = run_config(tmp_path, dataset={"path": str(path)}, environments=several)
    with pytest.raises(DatasetError, match="environments: no row names maze"):
        open_prompts(config, tmp_path, lambda: None)
