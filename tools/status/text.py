"""Numbers as `rl-status` writes them: short, with their unit; bars and sparklines out of characters.

Guarantee: pure; nothing is wider than it is told to be; what is not known is `-`.
"""

from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"


def rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.{1 if per_second < 10 else 0}f}/s"


def bar(share: float, width: int) -> tuple[str, str]:
    """The part that is done, and the rest."""
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done, "─" * (width - done)


def sparkline(values: Sequence[float], width: int) -> str:
    """From the smallest to the greatest of `values`; neighbours share a character where there are more than `width`."""
    values = _means(values, width)
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round((value - low) / (high - low) * steps) if high > low else steps // 2] for value in values
    )


def shortened(text: str, width: int) -> str:
    """Names differ at their end, so that the middle is left out."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _means(values: Sequence[float], count: int) -> Sequence[float]:
    if len(values) <= count:
        return values
    edges = [len(values) * i // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
