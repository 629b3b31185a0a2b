"""The schema of the one configuration file that both daemons read.

Guarantee: a `RunConfig` that exists is complete and consistent.
"""

from collections.abc import Iterator

from protocol.config.library_section import RESERVED, library_problems
from protocol.config.rules import contradictions
from protocol.config.run_values import RunValues
from protocol.config.section import Problems


class RunConfig(RunValues):
    """The configuration of a run. See docs/configuration.md, which is generated from this schema."""

    def problems(self) -> Problems:
        return contradictions(self)

    def all_problems(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for name in RESERVED:
            section = getattr(self, name)
            for problem in library_problems(name, section) if section is not None else ():
                yield (name,), problem
        yield from super().all_problems()
