"""The comparison of the tokens that producers make of prompts with those that the trainer makes.

Guarantee: of each producer the first group that answers a prompt in a single turn is compared, and then one of some `EVERY`
leases. A difference is told in words, and the group is trained as it was sampled: a chat template that writes the date makes
other tokens at another time. No proof of a swap sees a difference, because probes are token ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumer.link.sessions import ProducerSession
from protocol.wire.messages import Group

EVERY = 256
_MOST_NOTED = 64  # leases of one producer


@dataclass(frozen=True)
class PromptCheck:
    """The check of all producers. `tokens_of` makes token ids of a prompt; it may raise what a chat template raises."""

    tokens_of: Callable[[Any], Sequence[int]]

    def note(self, session: ProducerSession, lease_id: str, prompt: Any) -> None:
        """Note a lease that was given to a producer, if it is time to compare one."""
        session.leases_to_comparison -= 1
        if session.leases_to_comparison > 0:
            return
        session.noted_prompts[lease_id] = prompt
        if len(session.noted_prompts) > _MOST_NOTED:
            del session.noted_prompts[next(iter(session.noted_prompts))]

    def difference(self, session: ProducerSession, group: Group) -> str | None:
        """Return how the prompt's tokens differ from the trainer's; None if they are the same, or are not to be compared."""
        if group.lease_id not in session.noted_prompts:
            return None
        prompt = session.noted_prompts[group.lease_id]
        session.noted_prompts.clear()
        session.leases_to_comparison = EVERY
        try:
            own = np.array(self.tokens_of(prompt), "<i4")
        except Exception as error:  # a chat template raises what it likes
            return f"the trainer cannot make tokens of a prompt that it answered: {type(error).__name__}: {error}"
        if own.tobytes() == group.prompt_ids:
            return None
        theirs = np.frombuffer(group.prompt_ids[: len(group.prompt_ids) // 4 * 4], "<i4")
        length = min(len(own), len(theirs))
        first = int(np.argmax(np.append(own[:length] != theirs[:length], True)))
        return (
            f"it makes {len(theirs)} tokens of a prompt of which the trainer makes {len(own)}, and number {first} is the first "
            "to differ: give both the same tokenizer, chat template and release of transformers (a template that writes the "
            "date may differ by itself)"
        )
