"""Numbers as `slipstream status` writes them, short and with their unit, and a line of rewards drawn with characters.

Guarantee: pure; nothing is wider than asked for; a number that is not known is `-`.
"""

from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


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


def plain(value: float) -> str:
    return f"{value:.3g}"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per value, whose height is between the smallest and the greatest of `values`. If there are more than `width`
    of them, neighbours share a character."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round((value - low) / (high - low) * steps) if high > low else steps // 2] for value in values
    )


def shortened(text: str, width: int) -> str:
    """`text` without its middle if it is too long, because names differ at their end."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
