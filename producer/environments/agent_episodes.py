"""The calls of an outside agent for one completion of a task.

Guarantee: every token that the policy sampled for an answered call is in a record once, behind exactly the tokens that it saw,
and every call was sampled as the run is.
"""

from dataclasses import dataclass

from producer.calls.calls import Sampled
from producer.calls.requests import ServedRequest, malformed
from producer.groups import Episode, Record
from producer.interfaces import Completion
from protocol.wire.messages import Sampling

_AS_IN_TRAINING = ("temperature", "top_p", "top_k", "min_p")
_PENALTIES = ("presence_penalty", "frequency_penalty")


@dataclass(eq=False, kw_only=True)
class AgentEpisode(Episode):
    """One completion of a task, as it grows. Its last record is the one that grew last."""

    id: str
    floor: int
    num_calls: int = 0
    rewards: list[float] | None = None  # in the order of their names

    def note(self, sampled: Sampled) -> None:
        """Adds a call that was answered: it extends the record that it begins with, token by token, or begins another."""
        if self.rewards is not None:
            return
        seen = sampled.prompt_ids
        record = next((r for r in reversed(self.records) if seen[: len(r.token_ids)] == r.token_ids), None)
        if record is None:
            record = Record.of(seen)
            self.prompt_length = self.prompt_length or len(seen)
        else:
            self.records.remove(record)
            record.show(seen[len(record.token_ids) :])
        self.truncated = sampled.finish_reason == "length"
        record.sampled(Completion(sampled.token_ids, sampled.logprobs, self.truncated, sampled.token_versions))
        self.records.append(record)


def as_in_training(request: ServedRequest, sampling: Sampling) -> ServedRequest:
    """Returns the request, to be sampled as the lease says. Raises RefusedError if the request asks for something
    else."""
    if request.model != "policy" or request.num_completions != 1:
        raise malformed("a call of an episode asks for one completion of `policy`", "model")
    if (name := first_difference(request, sampling)) is not None:
        said = f"episodes are sampled with {name}={_wanted(sampling)[name]:g}, as the run is; leave it out"
        raise malformed(said, name)
    return sampled_as(request, sampling)


def first_difference(request: ServedRequest, sampling: Sampling) -> str | None:
    """The name of a field that makes the request's distribution differ from the run's, if there is one."""
    wanted = _wanted(sampling)
    return next((name for name, value in wanted.items() if request.fields.get(name, value) != value), None)


def sampled_as(request: ServedRequest, sampling: Sampling) -> ServedRequest:
    """Returns the request with the run's distribution, and no more tokens than a completion of the run may have."""
    limit = "max_completion_tokens" if request.kind == "chat" else "max_tokens"
    longest = sampling.max_completion_length
    asked = request.fields.get(limit, longest)
    return request.with_fields(_wanted(sampling) | {limit: min(asked, longest) if isinstance(asked, int) else asked})


def _wanted(sampling: Sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in _AS_IN_TRAINING} | dict.fromkeys(_PENALTIES, 0)
