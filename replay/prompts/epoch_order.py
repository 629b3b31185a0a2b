"""The order in which prompts have their first attempt in every epoch.

Guarantee: the order is a function of the seed, the epoch and which prompts are in cooldown, so a checkpoint needs a cursor and
the cooldowns, and nothing else of it.
"""

from typing import Any

import numpy as np

from protocol.errors import DatasetError
from replay.lease_ids import Key


class EpochOrder:
    """See the module's guarantee. Prompt ids are 0..num_prompts-1; without `shuffle` they keep their order."""

    def __init__(self, num_prompts: int, seed: int, *, shuffle: bool) -> None:
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._cooldowns: dict[int, int] = {}  # prompt -> the last epoch that it sits out
        self._begin_epoch(0)

    def next(self, wanted: Key | None = None) -> Key:
        """Moves the cursor to the next prompt that is not in cooldown, or is `wanted`."""
        while True:
            if self._position == self.num_prompts:
                self._begin_epoch(self.epoch + 1)
            key = Key(self.epoch, int(self._order[self._position]))
            self._position += 1
            if key == wanted or self._cooldowns.get(key.prompt_id, -1) < self.epoch:
                return key

    def is_ahead(self, key: Key) -> bool:
        """Whether this first attempt is still to come."""
        is_ahead = key.epoch > self.epoch or (key.epoch == self.epoch and self._ranks[key.prompt_id] >= self._position)
        return key.reroll == 0 and bool(is_ahead)

    def cool_down(self, prompt_id: int, until_epoch: int) -> None:
        """The prompt sits out every epoch up to this one. When all would, all come back."""
        self._cooldowns[prompt_id] = max(until_epoch, self._cooldowns.get(prompt_id, 0))

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._position,
            "num_prompts": self.num_prompts,
            "resting": [[prompt_id, until] for prompt_id, until in self._cooldowns.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises DatasetError if the dataset has another size than when the state was written."""
        if state["num_prompts"] != self.num_prompts:
            raise DatasetError(
                f"dataset: the dataset has {self.num_prompts} prompts now and had {state['num_prompts']} at the checkpoint; "
                "go on with the old one, or choose another run_dir"
            )
        self._begin_epoch(state["epoch"])
        self._cooldowns = dict(state["resting"])  # only now: if all are in cooldown, they come back with the next epoch
        self._position = state["position"]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._position = epoch, 0
        self._order = np.arange(self.num_prompts)
        if self._shuffle:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)
        self._ranks = np.argsort(self._order)  # the place of every prompt in this epoch's order
        self._cooldowns = {prompt_id: until for prompt_id, until in self._cooldowns.items() if until >= epoch}
        if len(self._cooldowns) == self.num_prompts:
            self._cooldowns = {}
