"""Rewards that come with Slipstream, by the name that `rewards.functions[].builtin` gives them.

Guarantee: `make` returns a function with TRL's signature, or raises `ConfigError` with what is missing.
`protocol.config.sections.builtin_rewards` has checked the options. For a completion that a function cannot score its list has an
exception, so that the reward of that completion alone is missing.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from protocol.config.sections.builtin_rewards import SHIPPED
from protocol.config.sections.rewards import RewardModel

_MODULES = {
    "exact_match": "answers",
    "numeric_match": "answers",
    "math_verify": "mathematics",
    "format_regex": "answers",
    "length_penalty": "lengths",
    "reasoning_length": "lengths",
    "code": "programs",
}


def make(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Makes the function of a builtin, or of the model at `options["path"]`, once per worker."""
    if name == "model":
        from producer.rewards.builtin.models import reward_model

        given = dict(options)
        return reward_model(given.pop("path"), RewardModel.model_validate(given))
    module = import_module(f"producer.rewards.builtin.{_MODULES[name]}")
    maker: Callable[[Any], Callable[..., Any]] = getattr(module, name)
    return maker(SHIPPED[name].model_validate(options))
