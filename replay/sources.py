"""The sources of a run's prompts (`dataset.sources`) and their environments: which prompt is of which, and counts of each.

Guarantee: a source has a range of prompt ids, as the journal's fact `sources` says it, so that whoever reads a journal can name
the source of each group. Prompts of one source alone have no name, and nothing is counted for them; so it is with environments.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

FACT = "sources"
SOURCES = "sources/"
"""The beginning of the names of totals and numbers of sources."""
ENVIRONMENTS = "environments/"
"""The beginning of those of environments."""


@dataclass(frozen=True)
class Parts:
    """A division of the prompts. `prefix` begins the names of totals and numbers of its parts; `name_of` names that of a
    prompt."""

    prefix: str
    names: tuple[str, ...]
    name_of: Callable[[int], str]

    def total_of(self, name: str, what: str) -> str:
        """Return the name of a part's total, and of a number of a step."""
        return f"{self.prefix}{name}/{what}"


ONE_ENVIRONMENT = Parts(ENVIRONMENTS, (), str)
"""The environments of prompts that have one alone."""


@dataclass(frozen=True)
class Sources:
    """The sources in the order of their prompts, each with the id of its first prompt. None: there are not several."""

    names: tuple[str, ...] = ()
    firsts: tuple[int, ...] = ()
    environments: Parts = field(default=ONE_ENVIRONMENT, compare=False)  # of the same prompts

    @property
    def parts(self) -> Iterator[Parts]:
        """The divisions of the prompts that have more than one part."""
        if self.names:
            yield Parts(SOURCES, self.names, self.name_of)
        if self.environments.names:
            yield self.environments

    @classmethod
    def of(cls, names: Iterable[str], counts: Iterable[int]) -> "Sources":
        """Return the sources with these numbers of prompts."""
        names = tuple(names)
        return cls(names, tuple(accumulate(counts, initial=0))[: len(names)]) if len(names) > 1 else cls()

    @classmethod
    def of_facts(cls, facts: Mapping[str, str]) -> "Sources":
        """Return the sources that the facts of a journal name."""
        rows = json.loads(facts.get(FACT, "[]"))
        return cls(tuple(name for name, _ in rows), tuple(first for _, first in rows))

    @property
    def facts(self) -> dict[str, str]:
        """The fact of a journal that names them."""
        return {FACT: json.dumps(list(zip(self.names, self.firsts, strict=True)))}

    def number_of(self, prompt_id: int) -> int:
        """Return which source a prompt is from, counted from 0."""
        return max(0, bisect_right(self.firsts, prompt_id) - 1)

    def name_of(self, prompt_id: int) -> str:
        """Return the name of a prompt's source; nothing if there are not several."""
        return self.names[self.number_of(prompt_id)] if self.names else ""

    def range_of(self, name: str) -> tuple[int, int] | None:
        """Return the first and the last prompt id of a source, the last of all without end; None if there is none of this
        name."""
        if name not in self.names:
            return None
        number = self.names.index(name)
        ends = (*self.firsts[1:], 2**62)
        return self.firsts[number], ends[number] - 1

    def count(self, totals: Counter[str], what: str, prompt_ids: Iterable[int], amount: int = 1) -> None:
        """Add `amount` for each of these prompts to the totals of its source and of its environment."""
        prompt_ids = list(prompt_ids)
        for parts in self.parts:
            for prompt_id in prompt_ids:
                totals[parts.total_of(parts.name_of(prompt_id), what)] += amount


ONE = Sources()
"""The sources of prompts that have one source alone."""


def total_of(source: str, what: str) -> str:
    """Return the name of a source's total, and of a number of a step."""
    return f"{SOURCES}{source}/{what}"
