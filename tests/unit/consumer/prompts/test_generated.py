"""Rows of reasoning-gym: written once, the same in each process, without those held out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from consumer.prompts import generated
from consumer.prompts.dataset import PromptDataset
from consumer.prompts.generated import Plan, Report, made, with_rows, write
from protocol.config.data import SourceSection
from protocol.config.loader import load_values
from protocol.config.run import RunConfig
from protocol.errors import DatasetError

pytestmark = pytest.mark.long  # the import takes seconds


def config_of(run_dir: Path, *sources: dict[str, Any], held_out: dict[str, Any] | None = None) -> RunConfig:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": "org/model"},
        "dataset": {"sources": list(sources)},
        "rewards": {"functions": [{"function": "reasoning_gym"}]},
    }
    return load_values(values | ({"evaluation": {"dataset": held_out}} if held_out else {}))


def sums(size: int, **values: Any) -> dict[str, Any]:
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {"reasoning_gym": "chain_sum", "size": size, "config": one_digit} | values


def plan_of(folder: Path, **values: Any) -> Plan:
    return Plan.of("dataset", SourceSection(**values), folder)


def test_rows_are_written_once_and_read_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        tmp_path,
        sums(60, template="Calculate {expression}."),
        {"reasoning_gym": "isomorphic_strings", "size": 20},
        held_out=sums(30),
    )
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    placed = with_rows(config)
    prompts, held_out = PromptDataset(placed.dataset), PromptDataset(placed.evaluation.dataset)
    entries = [json.loads(prompts[each][1]["entry"]) for each in range(len(prompts))]
    first = next(each for each in entries if each["metadata"]["source_index"] == 2)
    assert first["config"] == {"max_terms": 2, "max_digits": 1}  # what is not the default, for the scorer
    sum_rows = [each for each in entries if each["metadata"]["source_dataset"] == "chain_sum"]
    assert prompts[0][0][0]["content"] == f"Calculate {sum_rows[0]['metadata']['expression']}."
    assert all(eval(each["metadata"]["expression"]) == int(each["answer"]) for each in sum_rows)
    asked = {held_out[each][0][0]["content"] for each in range(len(held_out))}
    assert len(held_out) == 30
    assert len(sum_rows) < 60
    assert not asked & {each["question"] for each in sum_rows}

    def no_child(*_: Any) -> None:
        raise AssertionError("rows are written again")

    written = {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(generated, "_write_all", no_child)
        sets = {name: name.replace("0.1.", "0.0.") for name in written}  # as of another release
        for name, other in sets.items():
            (tmp_path / "rows" / name).rename(tmp_path / "rows" / other)
        assert PromptDataset(with_rows(config).dataset).digest == prompts.digest

    generated.copy_rows(tmp_path, tmp_path / "other")  # for a run that trains the journal of this one again
    with monkeypatch.context() as patched:
        patched.setattr(generated, "_write_all", no_child)
        copied = with_rows(config.model_copy(update={"run_dir": str(tmp_path / "other")}))
    assert PromptDataset(copied.dataset).digest == prompts.digest

    # Another process, whose hashes of text differ.
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    with_rows(config.model_copy(update={"run_dir": str(tmp_path / "again")}))
    assert {file.name: file.read_bytes() for file in (tmp_path / "again" / "rows").iterdir()} == written


def test_answers_that_look_like_times_stay_texts(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "When?"}], "answer": "2022-01-03", "entry": "{}"}]
    rows.append(rows[0] | {"answer": None})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = config_of(tmp_path, sums(2)).dataset
    placed = section.sources[0].model_copy(update={"path": str(file)})
    prompts = PromptDataset(section.model_copy(update={"sources": [placed]}))
    assert [prompts[number][1]["answer"] for number in (0, 1)] == ["2022-01-03", None]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"reasoning_gym": "chain_sums"}, "chain_sum"),
        ({"config": {"max_term": 3}}, "max_terms"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "config"),
        ({"config": {"max_terms": "two"}}, "config"),
        ({"reasoning_gym": "composite", "config": {}}, "source of its own"),
        ({"difficulty": 99}, "ends at"),
        ({"reasoning_gym": "acre", "config": {}, "difficulty": 0}, "no curriculum"),
        ({"template": "{expresion}"}, "expression"),
        ({"template": "{"}, "template"),
    ],
)
def test_refusals(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        write(plan_of(tmp_path, **sums(3) | values), set(), lambda report: None)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_of_the_child_is_the_run_s(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset\.sources\[1\]: .*chain_sum"):
        with_rows(config_of(tmp_path, sums(3), sums(3, reasoning_gym="chain_summ")))


def test_all_rows_held_out_are_refused(tmp_path: Path) -> None:
    held_out: set[str] = set()
    plan = plan_of(tmp_path, **sums(3))
    write(Plan.of("evaluation.dataset", SourceSection(**sums(3, seed=1)), tmp_path), held_out, lambda report: None)
    assert len(held_out) == 3
    with pytest.raises(DatasetError, match="held out"):
        write(plan, held_out, lambda report: None)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(DatasetError, match=r"\.\[reasoning\]"):
        made(plan_of(tmp_path, **sums(3)))


def test_a_difficulty_is_that_of_the_curriculum(tmp_path: Path) -> None:
    easy, hard = (
        made(plan_of(tmp_path, reasoning_gym="chain_sum", size=1, difficulty=level)).config for level in (0, 2)
    )
    own = made(plan_of(tmp_path, reasoning_gym="chain_sum", size=1, difficulty=2, config={"max_digits": 9})).config
    assert (easy.min_terms, easy.max_terms, easy.max_digits) == (2, 2, 1)
    assert hard.max_terms > easy.max_terms
    assert (own.max_terms, own.max_digits) == (hard.max_terms, 9)


def test_the_trainer_does_not_import_the_package() -> None:
    code = "import sys, consumer.prompts.generated; sys.exit('reasoning_gym' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_report_tells_the_file(tmp_path: Path) -> None:
    reports: list[Report] = []
    write(plan_of(tmp_path, **sums(3)), set(), reports.append)
    (file,) = tmp_path.iterdir()
    assert reports == [Report("dataset", 3, str(file))]
    assert plan_of(tmp_path, **sums(3)).file == str(file)
    assert plan_of(tmp_path, **sums(4)).file == ""
