"""Lets a model compute in training as in inference, where the completions are sampled.

Guarantee: log-probs are those of inference, whatever dropout, dropped layers and noise in routing the model's configuration has
for its training. What an adapter or `trainer` adds stays: dropout of LoRA is the run's own choice.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_DROPS = re.compile(r"dropout|drop_prob|drop_path|layerdrop|pdrop")


def compute_as_in_inference(base: Any) -> None:
    """Switch off, in a model without an adapter, what computes otherwise in training."""
    for config in _configs(base.config):
        _switch_off(config)
    for module in base.modules():
        _switch_off(module)
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if any("jitter" in name for name in vars(module)):  # also draws experts at random, as PhiMoE does
            _keep_evaluating(module)


def restore_drops(config: Any, given: Any) -> None:
    """Give a configuration the dropout that `given` has."""
    for own, other in zip(_configs(config), _configs(given), strict=True):
        for name in _drops(other):
            setattr(own, name, getattr(other, name))


def _configs(config: Any) -> tuple[Any, ...]:
    return config, config.get_text_config()


def _drops(owner: Any) -> Iterator[str]:
    return (name for name, value in vars(owner).items() if isinstance(value, float) and _DROPS.search(name))


def _switch_off(owner: Any) -> None:
    for name in list(_drops(owner)):
        setattr(owner, name, 0.0)


def _keep_evaluating(module: nn.Module) -> None:
    def train(mode: bool = True) -> nn.Module:
        for child in module.children():
            child.train(mode)
        return module

    module.training = False
    module.train = train
