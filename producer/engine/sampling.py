"""The fields of vLLM's API by which a group is sampled and its completions are limited.

Guarantee: every engine, and the endpoint, gets the same fields; a run without limits sets none.
"""

from typing import Any

from protocol.wire.messages import Sampling


def group_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request for a group, with the log-probs of the sampled tokens alone."""
    return {
        "n": sampling.num_generations,
        "max_tokens": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "logprobs": 0,
    } | limits(sampling)


def limits(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that limit a completion."""
    guides = {"regex": sampling.regex, "json": sampling.json_schema}
    fields: dict[str, Any] = {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "structured_outputs": {name: value for name, value in guides.items() if value},
    }
    return {name: value for name, value in fields.items() if value}
