"""The messages between the pool of reward workers and a worker.

Guarantee: msgspec checks the type of each field when it decodes one.
"""

from typing import Any, Literal

import msgspec

from producer.rewards.contract import TrainerState
from producer.rewards.spans import Spans
from protocol.wire.messages import Logged

Failure = Literal["raised", "timeout", "crashed", "memory", "invalid", "unavailable"]


class Source(msgspec.Struct, frozen=True):
    """The origin of a reward function: `module:function` or `file.py:function` of the user's, the name of a plugin, or the
    folder of a model."""

    place: str
    options: dict[str, Any] = {}
    is_model: bool = False


class Job(msgspec.Struct, frozen=True):
    """A group to score. The worker repeats prompt and columns for every completion, as TRL does."""

    prompt: Any
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, Any]
    reasoning_tokens: list[int] = []  # of each completion, for the function that asks for them
    state: TrainerState = TrainerState()

    def in_pieces(self, codec: Any) -> "Job":
        """Return the job with its token ids encoded one by one, so that other threads run in between: msgspec holds the GIL while
        it encodes."""
        ids = [msgspec.Raw(codec.encode(token_ids)) for token_ids in self.completion_ids]
        return msgspec.structs.replace(self, completion_ids=ids)


class Call(msgspec.Struct, frozen=True):
    """A request to the functions with these indexes. There are several only if all are asynchronous: the worker enforces the
    limits of asynchronous functions, the producer those of the others."""

    functions: list[int]
    jobs: list[Job]
    limits_s: list[float]


class Scores(msgspec.Struct, frozen=True):
    """The scores of one function: a float per completion (NaN for missing), or the reason for having none. A completion with
    `spans` is worth their sum."""

    rewards: list[float] | None
    problem: str = ""
    reason: Failure = "raised"
    failed: dict[int, tuple[Failure, str]] = {}  # completions that failed alone, by index; their rewards are NaN
    seconds: float = 0.0  # that the function took, if the worker knows
    is_final: bool = False  # whether another attempt would give the same
    spans: dict[int, Spans] = {}  # by completion
    logged: Logged = Logged()


class Answer(msgspec.Struct, frozen=True):
    """The scores of the functions of a call, in its order."""

    scores: list[Scores]


class Ready(msgspec.Struct, frozen=True):
    """The first frame of a worker: why functions could not be made, the indexes of the asynchronous ones, and the columns that
    each function needs."""

    problems: list[str]
    asynchronous: list[int] = []
    columns: list[list[str]] = []
    of_device: bool = False  # whether a GPU caused one of the problems
