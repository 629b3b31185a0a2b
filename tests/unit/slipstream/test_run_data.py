"""A run as tables: the same numbers as its files and its journal have, and clear errors where there are none."""

from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from slipstream import Run
from slipstream.run_reader import STEPS, RunReader
from tests.view_run import COMPLETIONS, completion_text, prompt_text, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), num_groups=24)


def test_steps_and_evaluations_are_the_lines_of_the_files(folder: Path) -> None:
    run = Run(folder)
    assert run.steps()["step"].tolist() == [line["step"] for line in RunReader(folder).lines(STEPS)]
    assert run.evaluations()[["version", "score"]].to_numpy().tolist() == [[4.0, 0.2], [12.0, 0.6]]


def test_groups_have_a_row_for_each_completion(folder: Path) -> None:
    found = Run(folder).groups(newest=5)
    with closing(RunReader(folder).journal()) as journal:
        newest = list(journal.rows(newest=5))
    assert found["lease_id"].tolist() == [row.lease_id for row in newest for _ in range(COMPLETIONS)]
    for row in newest:
        mine = found[found["lease_id"] == row.lease_id]
        assert set(mine["prompt"]) == {prompt_text(row.prompt_id)}
        expected = [completion_text(row.prompt_id, number) for number in range(COMPLETIONS)]
        assert mine["completion"].tolist() == expected
        assert mine["total"].tolist() == mine["rewards/correct"].tolist() or row.reward is None
    assert found["total"].isna().sum() == COMPLETIONS * sum(row.reward is None for row in newest) > 0


@pytest.mark.parametrize("table", ["steps", "groups", "evaluations"])
def test_a_table_becomes_a_dataset(folder: Path, table: str) -> None:
    from datasets import Dataset

    found = getattr(Run(folder), table)()
    made = Dataset.from_pandas(found)
    assert made.column_names == list(found.columns)
    assert made.to_pandas().equals(found)


def test_adapters_are_found_by_step_and_a_missing_one_is_named(folder: Path) -> None:
    run = Run(folder)
    assert run.adapter(9) == folder / "checkpoints" / "checkpoint-9"
    assert run.adapter() == folder / "checkpoints" / "checkpoint-10"
    with pytest.raises(ConfigError, match=r"3: there are no weights in .*steps that the run has kept: 9, 10"):
        run.adapter(3)


def test_the_status_is_that_of_the_command(folder: Path) -> None:
    status = Run(folder).status()
    assert status["answers"] is False
    assert [warning["name"] for warning in status["warnings"]] == ["nothing_answers"]
    assert max(line["step"] for line in status["rewards"]) == len(Run(folder).steps())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no daemon has worked there"):
        Run(tmp_path)
    (tmp_path / "metrics").mkdir()
    run = Run(str(tmp_path))
    assert (len(run.steps()), len(run.evaluations())) == (0, 0)
