"""`rl-journal stats`: how much of what a journal holds.

Guarantee: every group is counted once, in memory that does not grow with the journal.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from consumer.journal_text import clock, say, say_json, say_table, size, span
from replay.journal_reader import JournalReader

_MEANING = {
    "ready": "in no step yet",
    "claimed": "in a step that has not ended",
    "quarantined": "the trainer died too often in their step",
    "dropped": "do not fit the configuration any more",
}


def stats(reader: JournalReader, *, as_json: bool) -> None:
    found = collect(reader)
    if as_json:
        say_json(found)
        return
    letters = ", ".join(f"{reason} {count}" for reason, count in found["dead_letters"].items())
    quarantined = sum(states.get("quarantined", 0) for states in found["groups_by_outcome"].values())
    say(f"journal       {reader.path}, {size(found['file_bytes'])}, run {found['run_id'] or 'unknown'}")
    say(
        f"groups        {found['groups']} with {found['tokens']} tokens in {size(found['group_bytes'])}; "
        f"{found['groups_deleted']} older ones deleted"
    )
    say(f"arrived       {' to '.join(clock(time) for time in found['arrived']) or '-'}")
    say(f"steps         {span(*found['steps'])}")
    say(f"policies      {span(*found['policies'])}")
    say(f"dead letters  {sum(found['dead_letters'].values())}{letters and ': '}{letters}")
    say(f"quarantine    {quarantined} groups, {found['frames_quarantined']} frames")
    if found["groups"]:
        say()
        rows = (
            (outcome, state, str(count), _MEANING.get(state, ""))
            for outcome, states in found["groups_by_outcome"].items()
            for state, count in states.items()
        )
        say_table(("outcome", "state", "groups", ""), rows, right="groups")


def collect(reader: JournalReader) -> dict[str, Any]:
    """The statistics as plain data. Ranges are [first, last], or empty."""
    outcomes: dict[str, Counter[str]] = {}
    num_tokens = num_bytes = 0
    times: list[float] = []
    steps: list[int] = []
    for row in reader.rows():
        outcomes.setdefault(row.outcome, Counter())[row.state] += 1
        num_tokens += row.num_tokens
        num_bytes += row.num_bytes
        times = _widened(times, row.accepted_at)
        if row.state in ("trained", "claimed"):
            steps = _widened(steps, row.step, row.last_step)
    versions: list[int] = []
    for policy in reader.policies():
        versions = _widened(versions, policy.version)
    return {
        "run_id": reader.facts().get("run_id"),
        "file_bytes": sum(_size(Path(f"{reader.path}{suffix}")) for suffix in ("", "-wal")),
        "groups": sum(states.total() for states in outcomes.values()),
        "groups_deleted": reader.num_deleted(),
        "groups_by_outcome": {outcome: dict(sorted(outcomes[outcome].items())) for outcome in sorted(outcomes)},
        "group_bytes": num_bytes,
        "tokens": num_tokens,
        "arrived": times,
        "steps": steps,
        "policies": versions,
        "dead_letters": dict(Counter(letter.reason for letter in reader.dead_letters()).most_common()),
        "frames_quarantined": sum(1 for _ in reader.refused_frames()),
    }


def _widened(bounds: list[Any], *values: Any) -> list[Any]:
    return [min(*bounds, *values, values[0]), max(*bounds, *values, values[0])]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
