"""Asks the child process, and ends it.

Guarantee: there is at most one child. It ends `IDLE_S` after its last answer, when another policy is asked for, when it takes
longer than `LONGEST_S` or more memory than it may, and with the viewer. Whoever asks while it computes is told so.
"""

import asyncio
import logging

import msgspec
import numpy as np

from protocol.processes.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.throttle import Throttle
from replay.groups import RolloutGroup
from tools.tables import size
from tools.view.scores.kept import Scores
from tools.view.scores.policy import NoPolicyError
from tools.view.scores.questions import Answer, Policy, Question

LONGEST_S, IDLE_S = 300.0, 120.0
_LOOK_EVERY_S = 0.1
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Scorer:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._children = ChildProcesses(Throttle(logging.getLogger(__name__)))
        self._child: tuple[Policy, ChildProcess] | None = None
        self._busy = False
        self._idle: asyncio.TimerHandle | None = None

    async def scores(self, policy: Policy, max_bytes: int, group: RolloutGroup, temperature: float) -> Scores:
        """What the policy thinks of the tokens; `NoPolicyError` says why that is not known."""
        if self._busy:
            raise NoPolicyError("another group is being computed; ask again in a moment")
        self._busy = True
        try:
            prompt, completions = (ids.astype("<i4").tobytes() for ids in (group.prompt_ids, group.completion_ids))
            question = Question(prompt, completions, group.completion_lengths.tolist(), temperature)
            answer = await self._asked(self._child_of(policy), question, max_bytes)
        except BaseException:
            self._end()
            raise
        finally:
            self._busy = False
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)
        if answer.problem:
            raise NoPolicyError(f"the policy cannot be asked: {answer.problem}")
        found = Scores(np.frombuffer(answer.logprobs, "<f4"), np.frombuffer(answer.entropies, "<f4"))
        if any(len(values) != group.num_tokens for values in found):
            raise NoPolicyError("the child process answered for another group")
        return found

    async def close(self) -> None:
        self._end()
        await self._children.close()

    def _child_of(self, policy: Policy) -> ChildProcess:
        if self._idle is not None:
            self._idle.cancel()
        if self._child is not None and self._child[0] != policy:
            self._end()
        if self._child is None:
            try:
                started = self._children.start(
                    "tools.view.scores.child", msgspec.json.encode(policy).decode(), source="the newest policy",
                    environment=_ENVIRONMENT,
                )  # fmt: skip
            except ChildEndedError as error:
                raise NoPolicyError(f"the child process: {error}") from None
            self._child = policy, started
        return self._child[1]

    async def _asked(self, child: ChildProcess, question: Question, max_bytes: int) -> Answer:
        asked = asyncio.ensure_future(child.ask(question, Answer))
        try:
            async with asyncio.timeout(LONGEST_S):
                while not (await asyncio.wait({asked}, timeout=_LOOK_EVERY_S))[0]:
                    if child.process.resident_bytes() > max_bytes:
                        raise NoPolicyError(f"it took more than {size(max_bytes)} of memory and was ended")
            return asked.result()
        except TimeoutError:
            raise NoPolicyError(f"it took longer than {LONGEST_S:.0f} s and was ended") from None
        except ChildEndedError as error:
            raise NoPolicyError(f"the child process was lost: {error}") from None
        finally:
            if not asked.cancel() and not asked.cancelled():
                asked.exception()  # asyncio complains of an exception that nobody has read

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._child is not None:
            self._children.terminate(self._child[1])
            self._child = None
