"""The groups that are worth reading: five of the newest, each the first in another order.

Guarantee: the time for it does not grow with the run. A group is named once, under the first order that it leads.
"""

from typing import NamedTuple

import apsw

from slipstream_extras.view.index.cache import answer
from slipstream_extras.view.index.rows import UNSCORED, VERDICTS

_NEWEST = 2_000
_STALE = "(SELECT json_extract(line, '$.policy_version') FROM steps WHERE steps.step = groups.step) - version"
_ORDERS = {
    "highest spread": ("spread", "spread > 0"),
    "newest solved": ("seq", f"verdict = {VERDICTS.index('solved')}"),
    "longest": ("longest", "longest IS NOT NULL"),
    "most stale": (_STALE, f"step > 0 AND {_STALE} > 0"),
    "worst": ("-reward", f"reward > {UNSCORED!r}"),
}


class Worth(NamedTuple):
    why: str
    seq: int
    value: float  # by which it is ordered


def worth_reading(db: apsw.Connection) -> list[Worth]:
    """Return at most one group for each reason; none before the index has come to them."""
    found: list[Worth] = []
    for why, (value, condition) in _ORDERS.items():
        taken = ", ".join(str(one.seq) for one in found)
        sql = f"""SELECT seq, {value} FROM groups WHERE seq > (SELECT coalesce(max(seq), 0) - {_NEWEST} FROM groups)
            AND {condition} AND seq NOT IN ({taken}) ORDER BY 2 DESC, seq DESC LIMIT 1"""  # noqa: S608
        found += [Worth(why, seq, number) for seq, number in answer(db, sql)]
    return found
