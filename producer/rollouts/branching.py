"""A trunk, from which the completions of a group branch off.

Guarantee: a continuation begins with the trunk's own tokens, and with an environment that was asked the same as the trunk's and
gave the same answers. Any other answer fails the lease. The trunk's tokens are shown, not sampled, in every continuation.
"""

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from producer.environments.contract import Session
from producer.groups import Episode, LeaseFailure, Record
from protocol.config.rewards import EnvironmentSection
from protocol.wire.messages import Lease

_LONGEST = 200  # characters of an answer that a failure quotes


@dataclass(frozen=True)
class Place:
    """The place in an episode before a turn. `messages` are all so far, the first `num_given` of them the prompt's; `text` is
    how the chat template writes them."""

    turn: int  # from 1 on
    messages: list[dict[str, Any]]
    num_given: int
    text: str
    num_calls: int = 0


class Asked(NamedTuple):
    """A call of a method of a session, and what came of it."""

    method: str
    arguments: tuple[Any, ...]
    answer: Any
    done: bool


@dataclass
class RecordedSession:
    """A `Session` that keeps what it was asked."""

    session: Session
    asked: list[Asked] = field(default_factory=list)
    done: bool = False

    async def reset(self, columns: dict[str, Any], prompt_id: int) -> str | list[Any] | None:
        return await self._ask("reset", columns, prompt_id)  # type: ignore[no-any-return]

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[str | list[Any], bool]:
        return await self._ask("call", tool, arguments)  # type: ignore[no-any-return]

    async def reply(self, text: str) -> list[dict[str, Any]]:
        return await self._ask("reply", text)  # type: ignore[no-any-return]

    async def turn_reward(self) -> float | None:
        return await self._ask("turn_reward")  # type: ignore[no-any-return]

    async def reward(self) -> float | None:
        return await self._ask("reward")  # type: ignore[no-any-return]

    async def _ask(self, method: str, *arguments: Any) -> Any:
        answer = await getattr(self.session, method)(*arguments)
        self.done = self.session.done
        self.asked.append(Asked(method, arguments, answer, self.done))
        return answer


@dataclass(frozen=True)
class Branch:
    """The end of a trunk, which sampled `num_sampled` tokens. `token_ids` are what the policy goes on from, `prompt_length` of
    them the prompt's."""

    key: str  # of the environment's section
    place: Place
    token_ids: list[int]
    prompt_length: int
    num_sampled: int
    asked: list[Asked]

    @classmethod
    def at(cls, key: str, place: Place, episode: Episode, session: RecordedSession) -> "Branch":
        token_ids, asked = list(episode.records[-1].token_ids), list(session.asked)
        return cls(key, place, token_ids, episode.prompt_length, episode.num_sampled, asked)

    async def begin(self, environment: Session, episode: Episode) -> Place:
        """Bring a fresh environment to this place and begin an episode there. Raise LeaseFailure if the environment answers
        otherwise than the trunk's."""
        for each in self.asked:
            answer = await getattr(environment, each.method)(*each.arguments)
            if (answer, environment.done) != (each.answer, each.done):
                what = f"{each.method}{each.arguments if each.method != 'reset' else '(...)'!s:.{_LONGEST}}"
                raise LeaseFailure(
                    "environment_failed",
                    f"{self.key}.branch_after_turns: played again, {what} gave {answer!r:.{_LONGEST}}, done={environment.done}, "
                    f"and in the trunk {each.answer!r:.{_LONGEST}}, done={each.done}; remove the key, or make the environment "
                    "answer the same row and calls alike",
                )
        episode.prompt_length, episode.branch_length = self.prompt_length, len(self.token_ids)
        episode.records.append(Record.of(self.token_ids))
        return self.place


def trunk_turns(section: EnvironmentSection, lease: Lease) -> int:
    """Return how many turns of the lease's trunk there are to be, drawn by its id. Evaluations have no trunk."""
    if lease.evaluates is not None:
        return 0
    return random.Random(lease.lease_id).randint(*section.trunk_turns)  # noqa: S311 - no secret
