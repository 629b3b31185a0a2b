"""The policy as its own teacher: it scores its completions behind a prompt that says more, such as the solution.

Guarantee: `logprobs` returns the log-prob of every sampled token, finite and at most 0, on one policy version (with merged
weights on those that are there), or raises LeaseFailure: what the engine did not score is never a zero.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from producer.groups import LeaseFailure
from producer.rollouts.prompts import PromptFormat, malformed
from protocol.config.distillation import TeacherSection
from protocol.wire.messages import Group, Lease

Score = Callable[[list[int], int], Awaitable[list[float]]]
"""Returns the log-probs of tokens but the first, on a policy version (`InFlight.score`)."""

ScoresT = TypeVar("ScoresT")
_LEAST, _MOST = -9999.0, 1e-3  # vLLM's least over HTTP, and rounding may take a log-prob above 0


class TeacherObserver(Protocol):
    """Counts every request to a teacher, and every completion that it failed to score."""

    def teacher_called(self, teacher: str, seconds: float) -> None: ...

    def teacher_failed(self, teacher: str) -> None: ...


async def of_records(group: Group, score: Callable[[list[int]], Coroutine[Any, Any, ScoresT]]) -> list[ScoresT]:
    """Return what `score` returns for the tokens of each record of a group; all are asked at once. Raises an error of one
    of them: one that is no LeaseFailure, if there is one, because it ends the daemon."""
    ends = np.frombuffer(group.completion_lengths, "<i4").cumsum()[:-1]
    records = np.split(np.frombuffer(group.completion_ids, "<i4"), ends)
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(score(record.tolist())) for record in records]
    except ExceptionGroup as errors:
        raise next((e for e in errors.exceptions if not isinstance(e, LeaseFailure)), errors.exceptions[0]) from None
    return [task.result() for task in asked]


@dataclass
class SelfTeacher:
    section: TeacherSection
    prompts: PromptFormat
    score: Score
    observer: TeacherObserver

    async def logprobs(self, lease: Lease, group: Group) -> NDArray[np.float32]:
        """Return a log-prob for each token of the group, 0 where it was not sampled. All are of one version: the newest that
        sampled a token, or the current one if that is gone."""
        prompt = await self.prompts.in_thread(self._encode, lease)
        versions = np.frombuffer(group.token_versions, "<i4")
        version = int(versions.max()) if len(versions) else group.policy_version
        result = np.concatenate(await of_records(group, lambda record: self._scored(prompt, record, version)))
        return result * np.frombuffer(group.sampled, "u1") if group.sampled else result

    def _encode(self, lease: Lease) -> list[int]:
        """Return the tokens of the teacher's prompt. Raises LeaseFailure as `PromptFormat.encode`."""
        ids = self.prompts.encode(self._prompt(lease), 0)
        what = f"the prompt of teacher {self.section.name}"
        self.prompts.check_tokens(ids, lease.sampling.max_completion_length + 1, what)  # vLLM samples one behind
        return ids

    def _prompt(self, lease: Lease) -> Any:
        """Return the text, or the messages with the text in place of the last one's."""
        prompt, columns = lease.prompt, lease.columns
        content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        if not isinstance(content, str):
            raise malformed(prompt, f"teacher {self.section.name} expected a text, or at the end a text in")
        lacking = [name for name in self.section.columns if columns.get(name) in (None, "")]
        if lacking:
            raise LeaseFailure("bad_prompt", f"teacher {self.section.name}: the row has nothing as {lacking[0]!r}")
        try:
            text = self.section.filled(columns | {"prompt": content})
        except ValueError as error:
            raise LeaseFailure("bad_prompt", f"teacher {self.section.name}: {error}") from None
        return text if isinstance(prompt, str) else [*prompt[:-1], prompt[-1] | {"content": text}]

    async def _scored(self, prompt: list[int], record: list[int], version: int) -> NDArray[np.float32]:
        began = time.monotonic()
        try:
            found = np.array((await self.score(prompt + record, version))[len(prompt) - 1 :])
            if len(found) != len(record) or not (found <= _MOST).all():
                raise LeaseFailure("generation_failed", "the engine returned log-probs that are none")
        except LeaseFailure as failure:
            self.observer.teacher_failed(self.section.name)
            raise LeaseFailure(failure.reason, f"teacher {self.section.name}: {failure.detail}") from failure
        finally:
            self.observer.teacher_called(self.section.name, time.monotonic() - began)
        return np.clip(found, _LEAST, 0).astype(np.float32)
