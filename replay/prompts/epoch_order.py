"""The order in which prompts have their first attempt in every epoch.

Guarantee: the order is a function of the seed, the epoch and which prompts are in cooldown, so a checkpoint needs a cursor and
the cooldowns, and nothing else of it. It is computed place by place: neither time nor memory of an epoch's beginning grows with
the dataset, but for the prompts in cooldown.
"""

import hashlib
import math
from typing import Any

from protocol.errors import DatasetError
from replay.lease_ids import Key

_ROUNDS = 8
_WORD = 2**64 - 1


class Permutation:
    """A permutation of 0..size-1 that follows from a text.

    It is a Feistel network over the smallest square that holds all numbers; a number outside goes through it again until one is
    inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    def __init__(self, size: int, text: str) -> None:
        self._size = size
        self._side = math.isqrt(size - 1) + 1
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def at(self, place: int) -> int:
        """The number at this place."""
        number = place
        while True:
            left, right = divmod(number, self._side)
            for key in self._keys:
                left, right = right, (left + _mixed(right + key)) % self._side
            number = left * self._side + right
            if number < self._size:
                return number

    def place_of(self, number: int) -> int:
        """The place of this number."""
        place = number
        while True:
            left, right = divmod(place, self._side)
            for key in reversed(self._keys):
                left, right = (right - _mixed(left + key)) % self._side, left
            place = left * self._side + right
            if place < self._size:
                return place


def _mixed(value: int) -> int:
    """64 bits, each of which depends on all of those of the value (the finalizer of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


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
            key = Key(self.epoch, self._order.at(self._position) if self._order else self._position)
            self._position += 1
            if key == wanted or self._cooldowns.get(key.prompt_id, -1) < self.epoch:
                return key

    def is_ahead(self, key: Key) -> bool:
        """Whether this first attempt is still to come."""
        if key.reroll > 0 or key.epoch != self.epoch:
            return key.reroll == 0 and key.epoch > self.epoch
        place = self._order.place_of(key.prompt_id) if self._order else key.prompt_id
        return bool(place >= self._position)

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
        self._order = Permutation(self.num_prompts, f"{self._seed} {epoch}") if self._shuffle else None
        self._cooldowns = {prompt_id: until for prompt_id, until in self._cooldowns.items() if until >= epoch}
        if len(self._cooldowns) == self.num_prompts:
            self._cooldowns = {}
