"""`slipstream journal stats` counts what a journal holds.

Guarantee: every group is counted once, in memory that does not grow with the journal.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from replay.journal.reader import JournalReader
from replay.journal.schema import GroupFilter
from slipstream.tables import clock, number, size, span, write_json, write_line, write_table

_MEANING = {
    "ready": "in no step yet",
    "claimed": "in a step that has not ended",
    "quarantined": "the trainer died too often in their step",
    "dropped": "do not fit the configuration any more",
}


def stats(reader: JournalReader, *, as_json: bool) -> None:
    found = collect(reader)
    if as_json:
        write_json(found)
        return
    letters = ", ".join(f"{reason} {count}" for reason, count in found["dead_letters"].items())
    quarantined = sum(states.get("quarantined", 0) for states in found["groups_by_outcome"].values())
    write_line(f"journal       {reader.path}, {size(found['file_bytes'])}, run {found['run_id'] or 'unknown'}")
    write_line(
        f"groups        {found['groups']} with {found['tokens']} tokens in {size(found['group_bytes'])}; "
        f"{found['groups_deleted']} older ones deleted"
    )
    write_line(f"arrived       {' to '.join(clock(time) for time in found['arrived']) or '-'}")
    write_line(f"steps         {span(*found['steps'])}")
    write_line(f"policies      {span(*found['policies'])}")
    write_line(f"dead letters  {sum(found['dead_letters'].values())}{letters and ': '}{letters}")
    write_line(f"quarantine    {quarantined} groups, {found['frames_quarantined']} frames")
    replays, age = found["replays"], found["replays"]["mean_age_versions"]
    shown_age = "" if age is None else f", {age:.1f} versions old on average"
    write_line(f"replays       {replays['uses']} uses of {replays['groups']} groups{shown_age}")
    if found["verdicts"]:
        write_line(f"verdicts      {', '.join(f'{name} {count}' for name, count in found['verdicts'].items())}")
    if found["groups"]:
        write_line()
        rows = (
            (outcome, state, str(count), _MEANING.get(state, ""))
            for outcome, states in found["groups_by_outcome"].items()
            for state, count in states.items()
        )
        write_table(("outcome", "state", "groups", ""), rows, right="groups")
    if found["attempts"]:
        write_line()
        _say_attempts(found["attempts"])


def _say_attempts(attempts: list[dict[str, Any]]) -> None:
    """Attempt 1 is a prompt's first attempt in its epoch, 2 its first reroll, and so on."""
    rows = (
        (
            str(attempt["attempt"]), str(attempt["groups"]), str(attempt["scored"]),
            number(attempt["success_rate"]), number(attempt["groups_with_success"]),
        )
        for attempt in attempts
    )  # fmt: skip
    header = ("attempt", "groups", "completions", "success-rate", "groups-with-success")
    write_table(header, rows, right=" ".join(header))


def collect(reader: JournalReader) -> dict[str, Any]:
    """The statistics as plain data. Ranges are [first, last], or empty."""
    outcomes: dict[str, Counter[str]] = {}
    verdicts: Counter[str] = Counter()
    attempts: dict[int, Counter[str]] = {}
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
        if row.outcome != "stale":  # the prompt of a stale group has another group in its place
            verdicts[row.verdict] += 1
            attempt = attempts.setdefault(row.reroll + 1, Counter())
            attempt.update(groups=1, scored=row.num_scored, successes=row.num_successes)
            attempt.update(groups_scored=row.num_scored > 0, groups_with_success=row.num_successes > 0)
    versions: list[int] = []
    for policy in reader.policies():
        versions = _widened(versions, policy.version)
    return {
        "run_id": reader.facts().get("run_id"),
        "file_bytes": sum(_size(Path(f"{reader.path}{suffix}")) for suffix in ("", "-wal")),
        "groups": sum(states.total() for states in outcomes.values()),
        "groups_deleted": reader.num_deleted(),
        "groups_by_outcome": {outcome: dict(sorted(outcomes[outcome].items())) for outcome in sorted(outcomes)},
        "verdicts": dict(verdicts.most_common()),
        "attempts": [{"attempt": attempt} | _rates(attempts[attempt]) for attempt in sorted(attempts)],
        "replays": _replays(reader),
        "group_bytes": num_bytes,
        "tokens": num_tokens,
        "arrived": times,
        "steps": steps,
        "policies": versions,
        "dead_letters": dict(Counter(letter.reason for letter in reader.dead_letters()).most_common()),
        "frames_quarantined": sum(1 for _ in reader.refused_frames()),
    }


def _rates(counts: Counter[str]) -> dict[str, Any]:
    """Shares are of what was scored; they are None if nothing was."""
    return {
        "groups": counts["groups"],
        "scored": counts["scored"],
        "success_rate": _share(counts["successes"], counts["scored"]),
        "groups_with_success": _share(counts["groups_with_success"], counts["groups_scored"]),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _replays(reader: JournalReader) -> dict[str, Any]:
    """Count the replays of groups, and how old groups were then, against the policy that they trained."""
    num_uses = num_aged = age = 0
    step, version = -1, None
    for use in reader.uses():
        num_uses += 1
        if use.step != step:
            policy = reader.policy_at(use.step - 1)
            step, version = use.step, None if policy is None else policy.version
        row = reader.row(use.lease_id)
        if row is not None and version is not None:
            num_aged += 1
            age += version - row.policy_version
    num_groups = reader.count(GroupFilter(replays=(1, num_uses)))
    return {"uses": num_uses, "groups": num_groups, "mean_age_versions": _share(age, num_aged)}


def _widened(bounds: list[Any], *values: Any) -> list[Any]:
    return [min(*bounds, *values, values[0]), max(*bounds, *values, values[0])]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
