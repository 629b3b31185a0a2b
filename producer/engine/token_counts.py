"""How many tokens each request of the engine has been given, as its workers know it (`swap.mode: merged`).

Guarantee: counted are the steps that were launched, whether or not their results are known. What is kept is bounded, however many
requests end between two swaps, as they do for clients while no trainer is there.
"""

import re
from typing import Any

_KEPT_ENDED = 4096
"""Of requests that have ended the last ones, whose end the producer may not have heard of. It hears within a few steps."""


def completion_of(request: str) -> tuple[str, int] | None:
    """Group and number of the completion that vLLM calls so, if it is one: a number goes before those of several, a suffix may
    follow."""
    found = re.match(r"(?:(\d+)_)?(group-\d+)", request)
    return found and (found[2], int(found[1] or 0))


class TokenCounts:
    """A step that computes the position before token n samples token n. Requests that have ended
    are told by `take` once more, because whoever asks may not have heard of their end."""

    def __init__(self) -> None:
        self._prompt_lens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}  # before the request's last step
        self._num_scheduled: dict[str, int] = {}  # in that step
        self._num_known: dict[str, int] = {}  # tokens before it, which a preempted request computes once more
        self._ended: dict[str, None] = {}  # the oldest first
        self._forget_at = 2 * _KEPT_ENDED  # so many that have ended

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
        """Of each request that ran since the last call and may not have been heard of."""
        counts = {request: self._count(request) for request in self._prompt_lens}
        for request in list(self._ended):
            self._forget(request)
        self._forget_at = 2 * _KEPT_ENDED
        return counts

    def _forget_old(self) -> None:
        """A group is handed out as a whole, so a completion of it stays while another one runs."""
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
