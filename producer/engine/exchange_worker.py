"""Exchanging the engine's own weights inside vLLM's worker processes (`swap.mode: merged`, `lora: null`).

Guarantee: between two engine steps there is only the flip. It returns the number of tokens that each request had, counted by the
steps that were launched, whether or not their results are known.
"""

import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from producer.engine.adapter_worker import BackgroundWork, State

Survival = dict[str, tuple[float, float]]
"""By the last part of the module's name, the two sums whose quotient is S:

    S = sum((round(W + D) - W) * D) / sum(D * D)

W is the base and D the update, scaling * B @ A. S is 1 where nothing is lost and 0 where rounding undoes the update."""


class UnmappedError(Exception):
    """The engine does not have the checkpoint's weights as they are."""


class Exchange(BackgroundWork, ABC):
    """The weights that a worker has, those before them, and those that come next."""

    def __init__(self) -> None:
        super().__init__()
        self.survival: Survival = {}

    @abstractmethod
    def prepare(self, folder: Path | None, checksum: int | None = None) -> None:
        """Begin to make the weights of the policy in `folder`; None: those before the present ones."""

    @abstractmethod
    def install(self) -> None:
        """Give the model the weights that were prepared. All that was launched before has ended."""

    @abstractmethod
    def prove(self) -> None:
        """Begin to compare the present weights with what they should be. Called between two steps, after the flip."""

    def flip(self) -> None:
        """Install the prepared weights in all layers at once. Called between two steps."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.install()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def use_all_cores() -> None:
    """Let this thread run on each core of the producer. The engine binds its own to few."""
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


class ExchangeWorker:
    """The methods that vLLM adds to its workers (`worker_extension_cls`), for `producer.engine.weights.MergedWeights`."""

    def make_weights(self) -> Exchange:
        raise NotImplementedError

    def weights_start(self) -> str:
        """Return why this worker cannot exchange its weights; "" if it can."""
        try:
            self._weights = self.make_weights()
        except UnmappedError as error:
            return str(error)
        self._token_counts = TokenCounts()
        execute_model = self.execute_model  # type: ignore[has-type]

        def counted(step: Any, *arguments: Any) -> Any:
            self._token_counts.note(step)
            return execute_model(step, *arguments)

        self.execute_model = counted
        return ""

    def weights_prepare(self, path: str | None, checksum: int | None) -> None:
        """Begin to make the weights of the policy in `path`, whose files have this CRC-32 (None: any). Without one they are those
        before the present ones."""
        self._weights.prepare(None if path is None else Path(path), checksum)

    def weights_state(self) -> State:
        """Return the state of the last `weights_prepare` or `weights_prove`."""
        return self._weights.state

    def weights_prove(self) -> None:
        """Begin to compare the present weights with what they should be."""
        self._weights.prove()

    def weights_survival(self) -> Survival:
        """Return the share of their update that this worker's part of the present weights has, once they are proved."""
        return self._weights.survival

    def weights_flip(self) -> dict[str, int]:
        self._weights.flip()
        return self._token_counts.take()


_KEPT_ENDED = 4096
"""The number of requests that are kept after their end, which the producer may not know of for a few steps."""


def completion_of(request: str) -> tuple[str, int] | None:
    """Return group and number of the completion of this request id, if it is one. vLLM puts the number in front where there are
    several, and may add a suffix."""
    found = re.match(r"(?:(\d+)_)?(group-\d+)", request)
    return found and (found[2], int(found[1] or 0))


class TokenCounts:
    """The number of sampled tokens of each request. A step that computes the position before token n samples token n. `take`
    returns requests that have ended once more, because the caller may not know of their end. The number of kept requests is
    bounded, however many end between two swaps, as those of clients do while no trainer is there."""

    def __init__(self) -> None:
        self._prompt_lens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}  # before the request's last step
        self._num_scheduled: dict[str, int] = {}  # in that step
        self._num_known: dict[str, int] = {}  # tokens before it, which a preempted request computes once more
        self._ended: dict[str, None] = {}  # the oldest first
        self._forget_at = 2 * _KEPT_ENDED  # this number of ended requests

    def note(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            if new.req_id in self._prompt_lens:
                self._num_known[new.req_id] = self._count(new.req_id)
            self._prompt_lens[new.req_id] = len(new.prompt_token_ids)
            self._num_computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        self._num_computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._num_known.update(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        self._num_scheduled.update(step.num_scheduled_tokens)
        self._ended.update(dict.fromkeys(step.finished_req_ids))
        if len(self._ended) >= self._forget_at:
            self._forget_old()

    def take(self) -> dict[str, int]:
        """Return the count of each request that runs, or ended since the last call."""
        counts = {request: self._count(request) for request in self._prompt_lens}
        for request in list(self._ended):
            self._forget(request)
        self._forget_at = 2 * _KEPT_ENDED
        return counts

    def _forget_old(self) -> None:
        """Forget all but the last ended requests. A completion stays while another one of its group runs."""
        running = {completion_of(request) for request in self._prompt_lens.keys() - self._ended.keys()}
        groups = {completion[0] for completion in running if completion is not None}
        for request in list(self._ended)[:-_KEPT_ENDED]:
            completion = completion_of(request)
            if completion is None or completion[0] not in groups:
                self._forget(request)
        self._forget_at = len(self._ended) + _KEPT_ENDED

    def _forget(self, request: str) -> None:
        for facts in (self._prompt_lens, self._num_computed, self._num_scheduled, self._num_known, self._ended):
            facts.pop(request, None)

    def _count(self, request: str) -> int:
        computed = self._num_computed[request] + self._num_scheduled[request]
        return max(0, self._num_known.get(request, 0), computed - self._prompt_lens[request] + 1)
