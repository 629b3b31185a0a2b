"""`slipstream journal verify` checks whether a journal is whole.

Guarantee: every group is read, whatever is wrong with the others; each problem is one line with its place.
"""

import statistics
from collections.abc import Iterator

from protocol.errors import ExitCode, JournalError
from replay.journal.reader import JournalReader
from replay.journal.schema import RecordedBatch
from slipstream.journal.content import ContentReader
from slipstream.tables import size, span_of_steps, with_progress, write_line


def verify(reader: JournalReader) -> ExitCode:
    count = 0
    for check in (JournalReader.database_problems, _groups, _steps, _replays):
        problems: list[str] = []  # written afterwards, so that they do not run into the progress bar
        try:
            problems.extend(check(reader))
        except JournalError as error:  # the table cannot be read to its end
            problems.append(str(error))
        for problem in problems:
            write_line(problem.removeprefix(f"{reader.path}: "))
        count += len(problems)
    write_line(f"{count} problem{'' if count == 1 else 's'}")
    return ExitCode.JOURNAL if count else ExitCode.OK


def _groups(reader: JournalReader) -> Iterator[str]:
    bodies = ContentReader(reader)
    num_groups = num_bytes = 0
    for row in with_progress(reader.rows(), reader.count()):
        num_groups += 1
        num_bytes += row.num_bytes
        try:
            bodies.read(row)
        except JournalError as error:
            yield str(error)
    write_line(f"read {num_groups} groups, {size(num_bytes)}")


def _steps(reader: JournalReader) -> Iterator[str]:
    """Steps follow each other, and each has all its groups.

    Retention may have deleted some groups of the first step that is kept. Where groups are replayed it may have deleted groups
    of other steps too, because it deletes in the order of arrival, but those that may be replayed last. The number of groups per
    step may change when a run is resumed, so a batch of the size of its neighbour is whole, too.
    """
    while True:
        num_deleted = reader.num_deleted()
        batches = [(batch.step, batch.last_step, _positions(reader, batch)) for batch in reader.batches()]
        if reader.num_deleted() == num_deleted:
            break  # otherwise retention deleted groups meanwhile
    if not batches or (num_deleted and next(reader.uses(), None) is not None):
        return
    facts = reader.facts()
    sizes = [len(positions) for *_, positions in batches]
    per_step = int(facts.get("groups_per_step", statistics.mode(sizes)))
    may_be_less = facts.get("fill") == "sampled"
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
        usual = (per_step, *(sizes[near] for near in (index - 1, index + 1) if near in comparable))
        if count not in usual and not (may_be_less and count < per_step):
            yield f"{where}: {count} groups, expected {per_step}"
        if positions != list(range(count)):
            yield f"{where}: positions {', '.join(map(str, positions))}, expected 0 to {count - 1}"


def _replays(reader: JournalReader) -> Iterator[str]:
    """Check that every replayed group was trained before, and at most once in a step, which also trains others anew."""
    may_be_deleted = reader.num_deleted() > 0
    step, seen, last_step = -1, set[str](), None
    for use in reader.uses():
        where = span_of_steps(use.step, use.last_step)
        if use.step != step:
            step, seen = use.step, set()
            batch = next(reader.batches(step), None)
            last_step = batch.last_step if batch is not None and batch.step == step else None
            if last_step is None and not may_be_deleted:
                yield f"{where}: groups are replayed, and none is trained for the first time"
        if use.last_step != (last_step or use.last_step):
            yield f"{where}: group {use.lease_id} is replayed up to step {use.last_step}, expected {last_step}"
        if use.lease_id in seen:
            yield f"{where}: group {use.lease_id} is replayed twice"
        seen.add(use.lease_id)
        row = reader.row(use.lease_id)
        if row is None:
            yield f"{where}: group {use.lease_id} is replayed and is not there"
        elif row.last_step is None or row.last_step >= use.step:
            yield f"{where}: group {use.lease_id} is replayed and was not trained before"


def _positions(reader: JournalReader, batch: RecordedBatch) -> list[int | None]:
    fresh = map(reader.row, batch.lease_ids[: batch.num_fresh])
    positions = [row.position for row in fresh if row is not None]
    return positions + [use.position for use in reader.uses(of_step=batch.step)]
