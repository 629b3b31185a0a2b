"""Both formats of the logs, by hand."""

import json
import logging
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ExitCode
from protocol.runtime import logs

pytestmark = pytest.mark.usefixtures("own_logging")

logger = logging.getLogger("consumer.test")


def records(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.split("\n")[:-1]]


def test_a_record_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="json")
    logs.bind(run="5f0c", version=None)
    record = logger.makeRecord("consumer.test", logging.INFO, "file", 1, "step %d", (7,), None)
    record.created = 1_767_323_045.678  # 2026-01-02 03:04:05 UTC
    logger.handle(record)
    logs.bind(version=3)
    logger.warning("näxt\nline", extra={"fields": {"step": 8, "reward": float("nan"), "level": "mine"}})
    first, second = records(capsys)
    assert list(first.items()) == [
        ("ts", "2026-01-02T03:04:05.678Z"),
        ("level", "info"),
        ("role", "rl-trainer"),
        ("run", "5f0c"),
        ("logger", "consumer.test"),
        ("msg", "step 7"),
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", second.pop("ts"))
    assert second == {
        "level": "warning",
        "role": "rl-trainer",
        "run": "5f0c",
        "version": 3,
        "logger": "consumer.test",
        "msg": "näxt\nline",
        "step": 8,
        "reward": None,
    }


def test_a_traceback_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="json")
    try:
        raise ValueError("no\nway")
    except ValueError:
        logger.exception("it failed")
    [record] = records(capsys)
    assert record["msg"] == "it failed"
    assert record["exc"].startswith("Traceback (most recent call last)")
    assert record["exc"].endswith("ValueError: no\nway")


def test_text_is_short_and_its_further_lines_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="text")
    logger.info("two\nlines\n", extra={"fields": {"step": 8}})
    logger.warning("a peer says \x1b[2J\r\x85 and\tmore")
    shown = re.sub(r"^\d\d:\d\d:\d\d ", "12:00:00 ", capsys.readouterr().err, flags=re.MULTILINE)
    assert shown == (
        "12:00:00 rl-trainer INFO two\n    lines\n"
        "12:00:00 rl-trainer WARNING a peer says \\x1b[2J\\x0d\\x85 and\tmore\n"
    )


def test_a_message_whose_arguments_do_not_fit_is_still_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="json")
    logger.warning("%d of %d", "x")
    [record] = records(capsys)
    assert record["msg"] == "%d of %d ('x',)"


def test_a_record_stays_below_what_journald_takes_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="json")
    logger.warning("x" * 100_000)
    assert len(capsys.readouterr().err) < 48 * 1024


def test_levels_are_ours_to_set_and_libraries_warn(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", "debug", "json")
    library = logging.getLogger("library.of.others")
    library.info("chatter")
    library.warning("careful")
    logger.debug("detail")
    logs.configure("rl-trainer", "error", "json")
    logger.warning("not wanted")
    assert [(record["logger"], record["msg"]) for record in records(capsys)] == [
        ("library.of.others", "careful"),
        ("consumer.test", "detail"),
    ]


def test_a_library_with_a_handler_of_its_own_is_adopted(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("library.with.handler")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    logs.configure("rl-producer", log_format="json")
    logs.adopt_libraries()
    library.warning("careful")
    assert [record["logger"] for record in records(capsys)] == ["library.with.handler"]


def test_warnings_of_python_are_records_where_logs_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("rl-trainer", log_format="json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    [record] = records(capsys)
    assert record["logger"] == "py.warnings"
    assert "UserWarning: old" in record["msg"]


@pytest.mark.parametrize(
    ("under_systemd", "log_format", "begins"),
    [
        (True, "auto", '<4>{"ts"'),
        (True, "json", '<4>{"ts"'),
        (True, "text", "12:00:00 "),
        (False, "auto", "12:00:00 "),
        (False, "json", '{"ts"'),
    ],
)
def test_the_format_and_the_priority_for_journald(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    under_systemd: bool,
    log_format: Any,
    begins: str,
) -> None:
    monkeypatch.setattr(logs, "running_under_systemd", lambda: under_systemd)
    logs.configure("rl-trainer", log_format=log_format)
    logger.warning("careful")
    assert logs.structured() == ("{" in begins)
    assert re.sub(r"^\d\d:\d\d:\d\d ", "12:00:00 ", capsys.readouterr().err).startswith(begins)


@pytest.mark.long
def test_a_log_that_is_kept_has_records_and_notes_of_this_process_alone(tmp_path: Path) -> None:
    program = f"""
        import logging, os, pathlib
        from protocol.command_line import exit_code, leave
        from protocol.errors import ConfigError
        from protocol.runtime import logs

        logs.configure("rl-trainer")
        logs.keep(pathlib.Path({str(tmp_path / "trainer.log")!r}))
        logger = logging.getLogger("consumer.test")
        logger.info("step %d\\nof two", 1)
        if (child := os.fork()) == 0:
            logger.info("of a child")
            os._exit(0)
        os.waitpid(child, 0)
        logs.note("step 2/2")
        def fail():
            raise ConfigError("run.yaml:1: a key")
        leave(exit_code("rl-trainer", fail))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.CONFIG
    assert "of a child" in done.stderr
    kept = (tmp_path / "trainer.log").read_text()
    found = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "T", kept).splitlines()
    assert found == [
        "T INFO step 1",
        "    of two",
        "T INFO step 2/2",
        "T INFO error: run.yaml:1: a key (exit code CONFIG)",
    ]


@pytest.mark.long
def test_a_log_that_is_kept_has_at_most_two_files(tmp_path: Path) -> None:
    program = f"""
        import logging, pathlib
        from protocol.command_line import leave
        from protocol.runtime import logs

        logs._MAX_KEPT_BYTES = 1000
        logs.configure("rl-trainer")
        logs.keep(pathlib.Path({str(tmp_path / "trainer.log")!r}))
        for number in range(200):
            logging.getLogger("consumer.test").info("line %d", number)
        leave(0)
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60, check=True)
    first, second = sorted(tmp_path.iterdir())
    assert {first.name, second.name} == {"trainer.1.log", "trainer.log"}
    assert all(file.stat().st_size <= 1100 for file in (first, second))
    assert second.read_text().endswith("line 199\n")
