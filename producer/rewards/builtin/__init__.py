"""Rewards that come with Slipstream, by the name that `rewards.functions[].builtin` gives them.

Guarantee: `make` returns a function with TRL's signature, or raises `ConfigError` with what is missing.
`protocol.config.rewards` has checked the options. For a completion that a function cannot score its list has an
exception, so that the reward of that completion alone is missing.
"""

from collections.abc import Callable
from typing import Any

from producer.rewards.builtin import answers, models, programs
from protocol.config.rewards import SHIPPED, RewardModel


def make(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Makes the function of a builtin, or of the model at `options["path"]`, once per worker."""
    if name == "model":
        path, settings = options["path"], {key: value for key, value in options.items() if key != "path"}
        return models.reward_model(path, RewardModel.model_validate(settings))
    maker: Callable[[Any], Callable[..., Any]] = getattr(programs if name == "code" else answers, name)
    return maker(SHIPPED[name].model_validate(options))
