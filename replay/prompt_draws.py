"""Decides which prompts of an epoch are asked: by the chance that their groups have signal (`dataset.sampling: by_signal`), and
by their levels (`dataset.curriculum`).

Guarantee: the order of an epoch is decided a block of `BLOCK` places at a time, and the decision is in the journal before a
prompt of the block is leased. So a run that was killed decides alike. Of the prompts of a block that are open, the best is asked,
and every one with a probability of `LEAST` or more, times the share of its level. The random numbers follow from the seed, the
epoch and the prompt. On a full disk nothing is decided, and every open prompt of the block is asked.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from replay.curriculum import Curriculum
from replay.journal.writer import Journal, JournalFullError
from replay.signal_chances import GradedGroup, SignalChances
from replay.sources import SOURCES, Sources, total_of

logger = logging.getLogger(__name__)

BLOCK = 32
"""Places of an epoch's order that are decided together."""

LEAST = 0.1
"""The least probability with which a prompt is asked."""

SAID_CHANGE = 0.1
"""The log has a weight that differs by so much from what it had last."""

BY_SIGNAL = "by_signal"
"""The beginning of the names of weights in a step's numbers."""


@dataclass(eq=False)
class PromptDraws:
    """The decisions of a run."""

    journal: Journal
    chances: SignalChances | None
    seed: int
    curriculum: Curriculum | None = None
    version: int = field(default=0, init=False)  # the newest policy
    _said: dict[str, float] = field(default_factory=dict, init=False)  # weights that the log has

    def note(self, group: GradedGroup) -> None:
        """Learn from a group that arrived."""
        for part in self._parts.values():
            part.note(group)

    def weights(self, sources: Sources) -> dict[str, float]:
        """Return the weights of prompts, which are their chances in relation to the best that is known, by source and verdict of
        the last group. Log those that changed by `SAID_CHANGE`."""
        known = self.chances.estimates(self.version) if self.chances else {}
        best = max((each.chance for each in known.values()), default=1.0)
        found, changes = dict[str, float](), list[str]()
        for (source, verdict), (chance, with_signal, groups) in sorted(known.items()):
            key = f"{BY_SIGNAL}/{verdict}"
            name = total_of(sources.names[source], key) if sources.names else key
            weight = found[name] = probability(chance, best)
            if abs(weight - (before := self._said.get(name, 1.0))) >= SAID_CHANGE:
                self._said[name] = weight
                numbers = f"{with_signal:.1f} of {groups:.1f} groups had signal, so the chance is {chance:.2f}"
                changes.append(f"{name.removeprefix(SOURCES)} {weight:.2f}, was {before:.2f} ({numbers})")
        if changes:
            logger.info("dataset.sampling: weights changed; the best chance is %.2f: %s", best, "; ".join(changes))
        return found

    def state(self) -> dict[str, Any]:
        """Return all that is known as plain data."""
        return {name: part.state() for name, part in self._parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            if name in state:
                part.restore(state[name])

    @property
    def _parts(self) -> dict[str, SignalChances | Curriculum]:
        parts = {"signal": self.chances, "curriculum": self.curriculum}
        return {name: part for name, part in parts.items() if part is not None}

    def asked(self, epoch: int, block: int, prompt_ids: Sequence[int | None]) -> list[bool]:
        """Tell for each prompt of a block whether it is asked in this epoch; None is one that sits out anyway."""
        mask = self.journal.drawn(epoch, block)
        if mask is None:
            chosen = self._choose(epoch, prompt_ids)
            mask = sum(1 << place for place, is_asked in enumerate(chosen) if is_asked)
            try:
                self.journal.note_draw(epoch, block, mask)
            except JournalFullError:
                return [prompt_id is None or self.share(prompt_id) > 0.0 for prompt_id in prompt_ids]
        return [bool(mask >> place & 1) for place in range(len(prompt_ids))]

    def _choose(self, epoch: int, prompt_ids: Sequence[int | None]) -> list[bool]:
        shares = {prompt_id: self.share(prompt_id) for prompt_id in prompt_ids if prompt_id is not None}
        chances = {each: self._chance(each) for each, share in shares.items() if share > 0.0}
        best = max(chances.values(), default=1.0)
        return [
            prompt_id in chances
            and self._uniform(epoch, prompt_id) < shares[prompt_id] * probability(chances[prompt_id], best)
            for prompt_id in prompt_ids
        ]

    def share(self, prompt_id: int) -> float:
        """Return the probability with which the level of a prompt lets it be asked."""
        return 1.0 if self.curriculum is None else self.curriculum.share(prompt_id)

    def _chance(self, prompt_id: int) -> float:
        return 1.0 if self.chances is None else self.chances.chance(prompt_id, self.version)

    def _uniform(self, epoch: int, prompt_id: int) -> float:
        """Return a number in [0, 1) that is this prompt's in this epoch."""
        digest = hashlib.blake2b(f"draw {self.seed} {epoch} {prompt_id}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53


def probability(chance: float, best: float) -> float:
    """Return the probability with which a prompt is asked: its chance in relation to the best of its block, 0.1 to 1."""
    return max(LEAST, chance / best)
