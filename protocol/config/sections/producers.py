"""Section `producers`: how many of them a cluster keeps.

Guarantee: the bounds hold each other; daemons that somebody starts by hand are not counted.
"""

from typing import Annotated

from pydantic import Field

from protocol.config.sections.section import Problems, Section

_Number = Annotated[int, Field(ge=1, le=4096)]


class ProducersSection(Section):
    min: _Number = Field(1, description="Producers that stay, however idle they are.")
    max: _Number = Field(
        description="Producers that are started at most, one after the other while the trainer waits for rollouts and there is "
        "room."
    )

    def problems(self) -> Problems:
        if self.min > self.max:
            yield f"min={self.min} is more than max={self.max}"
