"""Lease ids: which prompt a lease is for, as text on the wire and in the journal.

Guarantee: an id is taken apart once, where it comes in, and is a value from there on. Text that no trainer writes is refused.
"""

from typing import Any, NamedTuple

_EVALUATION = "evaluation-"


class UnknownLeaseError(KeyError):
    """The text is not the id of a lease that a trainer of this run can have given."""


class Key(NamedTuple):
    """The key of a prompt in an epoch. A deferred prompt that returns has a key of its own."""

    epoch: int
    prompt_id: int
    reroll: int = 0  # times that the prompt had been deferred; 0 is the first attempt


class LeaseId(NamedTuple):
    """The id of a lease for training. It says what the lease is for to every later process of the run."""

    key: Key
    attempt: int  # leases of this key so far, this one included
    session: str  # of the trainer process that gave it

    def __str__(self) -> str:
        return "-".join(map(str, (*self.key, self.attempt, self.session)))

    @classmethod
    def parse(cls, text: str) -> "LeaseId":
        """Raise UnknownLeaseError if no ledger wrote this text."""
        *numbers, attempt, session = _fields(text, 5)
        return cls(Key(*numbers), attempt, session)


class EvaluationLeaseId(NamedTuple):
    """The id of a lease for an evaluation."""

    version: int  # the policy that is evaluated
    prompt_id: int
    attempt: int
    session: str

    def __str__(self) -> str:
        return _EVALUATION + "-".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "EvaluationLeaseId":
        """Raise UnknownLeaseError if no evaluation wrote this text."""
        if not is_evaluation(text):
            raise UnknownLeaseError(text)
        return cls(*_fields(text.removeprefix(_EVALUATION), 4))


def is_evaluation(text: str) -> bool:
    """Return whether the lease is one of an evaluation, of this process or another."""
    return text.startswith(_EVALUATION)


def _fields(text: str, count: int) -> list[Any]:
    *numbers, session = text.split("-")
    if len(numbers) != count - 1 or not all(number.isdecimal() and len(number) < 16 for number in numbers):
        raise UnknownLeaseError(text)
    return [*map(int, numbers), session]
