"""The `guards:` section: when a run is hopeless and ends."""

from pydantic import Field

from protocol.config.sections.section import Positive, Section


class GuardsSection(Section):
    max_groups_without_signal: Positive | None = Field(
        1024,
        description="The run ends with exit code 67 when so many groups in a row had no signal (all rewards equal, or none) "
        "while the trainer waits for a batch. null: only the stall timeout ends it.",
    )
