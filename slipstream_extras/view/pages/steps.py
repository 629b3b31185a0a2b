"""The table of steps: its columns, their order, its rows.

Guarantee: pure; a step without a number in the sorted column comes last.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from replay.journal.schema import PolicyRow
from slipstream_extras.view.pages.forms import FormError

_RATIO = "sampling/importance_sampling_ratio"
COLUMNS = {
    "step": "step", "reward": "reward", "no signal": "frac_reward_zero_std", "entropy": "entropy",
    "ess": f"{_RATIO}/effective_sample_share", "kl": f"{_RATIO}/kl", "ratio": f"{_RATIO}/mean", "ratio p99": f"{_RATIO}/p99",
    "loss": "loss", "gradient": "grad_norm", "staleness": "staleness/mean", "oldest": "staleness/max", "replayed": "replay/share",
    "length": "completions/mean_length", "cut off": "completions/clipped_ratio", "wait s": "wait_s", "step s": "step_s",
    "tokens": "tokens",
}  # fmt: skip
"""The headings, and the names in `steps.jsonl`."""
_PAGE = 100
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip


class StepsPage(NamedTuple):
    rows: list[list[float | None]]  # as the columns
    total: int  # that the filter lets through
    sort: str
    ascending: bool
    where: str
    links: dict[str, str]  # that sort by each column
    before: str | None
    after: str | None


def sorted_steps(lines: Sequence[dict[str, Any]], query: Mapping[str, str]) -> StepsPage:
    """The page that `query` names with `sort`, `order`, `where` (such as `reward<0.5 staleness>=2`) and `page`."""
    sort, ascending, where = query.get("sort") or "step", query.get("order") == "ascending", query.get("where", "")
    if sort not in COLUMNS:
        raise FormError(f"sort: expected one of {', '.join(COLUMNS)} (got {sort[:40]!r})")
    conditions = [_condition(part) for part in where.split()]
    fitting = [line for line in lines if all(fits(line) for fits in conditions)]
    column = COLUMNS[sort]
    known = [line for line in fitting if _number(line, column) is not None]
    known.sort(key=lambda line: line[column], reverse=not ascending)
    ordered = known + [line for line in fitting if _number(line, column) is None]
    first = _page_number(query) * _PAGE
    fields = {name: query[name] for name in ("sort", "order", "where") if query.get(name)}

    def to(number: int) -> str:
        return urlencode(fields | {"page": number})

    links = {
        name: urlencode(
            {"where": where, "sort": name, "order": "descending" if ascending or name != sort else "ascending"}
        )
        for name in COLUMNS
    }
    return StepsPage(
        rows=[[_number(line, key) for key in COLUMNS.values()] for line in ordered[first : first + _PAGE]],
        total=len(ordered),
        sort=sort,
        ascending=ascending,
        where=where,
        links=links,
        before=to(first // _PAGE - 1) if first else None,
        after=to(first // _PAGE + 1) if first + _PAGE < len(ordered) else None,
    )


def _page_number(query: Mapping[str, str]) -> int:
    text = query.get("page", "0")
    if not (text.isdecimal() and len(text) < 10):
        raise FormError(f"page: expected a whole number (got {text[:40]!r})")
    return int(text)


def _condition(text: str) -> Callable[[dict[str, Any]], bool]:
    """`COLUMN<NUMBER`, with an underscore for a space in the name of a column."""
    for sign, compare in _COMPARE.items():
        name, found, bound = text.partition(sign)
        column = COLUMNS.get(name.replace("_", " "))
        if found and column is not None:
            try:
                limit = float(bound)
            except ValueError:
                break
            return lambda line: (value := _number(line, column)) is not None and compare(value, limit)
    raise FormError(f"where: expected such as reward<0.5, with a column of the table (got {text[:40]!r})")


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return value if isinstance(value, int | float) else None


class Swap(NamedTuple):
    producer: str
    ms: float  # from the announcement to the first request on it
    load_ms: float | None
    probe_ms: float | None
    difference: float | None  # of log-probs of the probe from the trainer's, in nats


class PolicyLine(NamedTuple):
    policy: PolicyRow
    swaps: list[Swap]
    refusals: list[tuple[str, str]]  # producer and reason
    score: float | None


def policy_rows(
    policies: Sequence[PolicyRow],
    timelines: Mapping[str, Sequence[dict[str, Any]]],
    evaluations: Sequence[dict[str, Any]],
) -> list[PolicyLine]:
    """`timelines` are the lines of each producer by the name of its file."""
    swaps: dict[int, list[Swap]] = {}
    refusals: dict[int, list[tuple[str, str]]] = {}
    for file, events in timelines.items():
        name = file.removeprefix("producer-").removesuffix(".jsonl")
        for event in events:
            version = event.get("version")
            if event.get("event") == "swap" and isinstance(version, int) and (ms := _written(event, "ms")) is not None:
                numbers = (_written(event, key) for key in ("load_ms", "probe_ms", "probe_difference"))
                swap = Swap(name, ms, *numbers)
                swaps.setdefault(version, []).append(swap)
            elif event.get("event") == "swap_refused" and isinstance(version, int):
                refusals.setdefault(version, []).append((name, str(event.get("reason", ""))))
    scores = {line.get("version"): _written(line, "score") for line in evaluations}
    return [
        PolicyLine(policy, swaps.get(policy.version, []), refusals.get(policy.version, []), scores.get(policy.version))
        for policy in reversed(policies)
    ]


def _written(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, int | float) else None
