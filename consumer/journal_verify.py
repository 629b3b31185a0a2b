"""`rl-journal verify`: whether a journal is whole.

Guarantee: every group is read, whatever is wrong with the others; each problem is one line that says what and where.
"""

import statistics
from collections.abc import Callable, Iterator

from consumer.journal_content import ContentReader
from consumer.journal_text import say, size, span_of_steps, with_progress
from protocol.errors import ExitCode, JournalError
from replay.journal_reader import Batch, JournalReader


def verify(reader: JournalReader) -> ExitCode:
    count = 0
    for check in (_database, _groups, _steps):
        for problem in _found_by(check, reader):
            say(problem.removeprefix(f"{reader.path}: "))
            count += 1
    say(f"{count} problem{'' if count == 1 else 's'}")
    return ExitCode.JOURNAL if count else ExitCode.OK


def _found_by(check: Callable[[JournalReader], Iterator[str]], reader: JournalReader) -> list[str]:
    """All at once, so that they do not run into the progress bar."""
    problems: list[str] = []
    try:
        problems.extend(check(reader))
    except JournalError as error:  # a table that cannot be read to its end
        problems.append(str(error))
    return problems


def _database(reader: JournalReader) -> Iterator[str]:
    yield from reader.database_problems()


def _groups(reader: JournalReader) -> Iterator[str]:
    bodies = ContentReader(reader)
    num_groups = num_bytes = 0
    for row in with_progress(reader.rows(), reader.count(), "group"):
        num_groups += 1
        num_bytes += row.num_bytes
        try:
            bodies.read(row)
        except JournalError as error:
            yield str(error)
    say(f"read {num_groups} groups, {size(num_bytes)}")


def _steps(reader: JournalReader) -> Iterator[str]:
    """Steps follow each other, and each has all its groups. Retention may have deleted some of the first one kept.

    The number of groups per step may change when a run is resumed, so that a batch like its neighbour is whole too.
    """
    while True:
        num_deleted = reader.num_deleted()
        batches = [(batch.step, batch.last_step, _positions(reader, batch)) for batch in reader.batches()]
        if reader.num_deleted() == num_deleted:
            break  # otherwise retention was at work meanwhile
    if not batches:
        return
    sizes = [len(positions) for _, _, positions in batches]
    per_step = int(reader.facts().get("groups_per_step", statistics.mode(sizes)))
    comparable = range(1 if num_deleted else 0, len(batches))
    expected = batches[0][0]
    for index, (step, last_step, positions) in enumerate(batches):
        if step > expected:
            yield f"{span_of_steps(expected, step - 1)}: no groups"
        elif step < expected:
            yield f"{span_of_steps(step, expected - 1)}: recorded twice"
        expected = last_step + 1
        if index not in comparable:
            continue
        where, count = span_of_steps(step, last_step), sizes[index]
        if count not in (per_step, *(sizes[near] for near in (index - 1, index + 1) if near in comparable)):
            yield f"{where}: {count} groups, expected {per_step}"
        if positions != list(range(count)):
            yield f"{where}: positions {', '.join(map(str, positions))}, expected 0 to {count - 1}"


def _positions(reader: JournalReader, batch: Batch) -> list[int | None]:
    rows = map(reader.row, batch.group_ids)
    return [row.position for row in rows if row is not None]
