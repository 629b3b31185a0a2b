"""The file with the output of a command."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from slipstream.cluster.daemon import Output
from slipstream.cluster.manager import Events


def write(output: Output, text: str) -> None:
    file = output.opened()
    os.write(file, text.encode())
    os.close(file)


def test_the_last_words_are_the_error_of_the_newest_process_or_its_last_lines(tmp_path: Path) -> None:
    output = Output(tmp_path / "daemon" / "trainer.log")
    write(output, "old: error: not this\n")
    write(output, "begins\nrl-trainer: error: run.yaml:3: lora.r: too large\n  make it smaller\n")
    assert output.last_words() == "rl-trainer: error: run.yaml:3: lora.r: too large\n  make it smaller"
    write(output, "".join(f"line {number}\n" for number in range(20)))
    assert output.last_words() == "\n".join(f"line {number}" for number in range(14, 20))
    assert output.last_lines(2) == ["line 18", "line 19"]
    write(output, "")
    assert output.last_words() == ""
    assert (tmp_path / "daemon").stat().st_mode & 0o077 == 0
    assert (tmp_path / "daemon/trainer.log").stat().st_mode & 0o077 == 0


def test_two_files_at_most_and_a_process_that_goes_on_writing(tmp_path: Path) -> None:
    output = Output(tmp_path / "x.log", max_bytes=100)
    file = output.opened()
    for number in range(100):
        os.write(file, f"line {number}\n".encode())
        output.rotate()
    os.close(file)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 120
    assert output.last_lines(3) == ["line 97", "line 98", "line 99"]


def test_a_full_disk_and_a_file_that_somebody_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = Output(tmp_path / "x.log", max_bytes=3)
    write(output, "words\n")
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "copyfile", full)
        output.rotate()
    assert output.last_words() == "words"
    (tmp_path / "x.log").unlink()
    output.rotate()
    assert (output.last_words(), output.last_lines(3)) == ("", [])


def test_events_are_lines_and_nobody_gets_one_twice(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.log")
    for number in range(3):
        events.add(f"event {number}\nand \x1b[2J more")
    count, lines = events.since(1)
    assert count == 3
    assert [line.split(" ", 1)[1] for line in lines] == [f"event {n} | and \\x1b[2J more" for n in (1, 2)]
    assert events.since(3) == (3, [])
    assert len(events.last_lines(2)) == 2
    for number in range(2000):
        events.add(str(number))
    assert len(events.since(0)[1]) == 1000
    assert events.since(2002)[1][0].endswith(" 1999")
    assert Events(tmp_path / "events.log").last_lines(1)[0].endswith(" 1999"), "the file outlives its manager"
