"""Feature matching as a reward of a group: EBFT (Jelassi et al., arXiv:2603.12248) in the form of rewards.

    r_i = alignment cos(phi_i, phi) - diversity mean_{j != i} phi_i phi_j

phi_i are the features of prompt and completion i, phi those of prompt and answer: hidden states of a frozen model at some of its
layers, each of unit length, next to each other and pooled. `whiten` multiplies them by W = U diag(1/S) U^T of the group's
phi^T = U S V^T, in which singular values below 1e-5 of the largest count as none. Without it, and in a group of one, each phi
gets unit length.

Guarantee: equal texts of a group have equal features. A text without tokens, or without any in the completion where only these
count, has features of zero, and a cosine of 0.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from producer.rewards.builtin import column_of
from producer.rewards.spans import text_of
from protocol.config.reward_options import FeatureMatching
from protocol.errors import ConfigError
from protocol.wire.answers import right_answers
from slipstream_extras.reward_models.models import loaded, outputs

Features = NDArray[np.float64]
_TOLERANCE = 1e-5
_REMEMBERED = 64  # groups, which entries with another `score` ask for again


class Match(NamedTuple):
    """The match of the n completions of a group with an answer."""

    alignment: Features  # (n,), cos(phi_i, phi)
    diversity: Features  # (n,), the mean of phi_i phi_j over the others
    distance: float  # |mean phi_i - phi|^2

    @classmethod
    def of(cls, group: Features, answer: Features, *, whiten: bool) -> "Match":
        """Compare the features of a group, (n, d), with those of an answer, (d,)."""
        count = len(group)
        if whiten and count > 1:
            basis, sizes, _ = np.linalg.svd(group.T, full_matrices=False)
            known = sizes > _TOLERANCE * sizes.max()
            whitening = basis[:, known] / sizes[known]  # without the last rotation, which no product sees
            group, answer = group @ whitening, answer @ whitening
        else:
            group, answer = _unit(group), _unit(answer)
        products = group @ group.T
        others = (products.sum(1) - np.diag(products)) / max(1, count - 1)
        distance = float(np.square(group.mean(0) - answer).sum())
        return cls(_unit(group) @ _unit(answer), others, distance)

    def score(self, options: FeatureMatching) -> list[float]:
        if options.score == "distance":
            return [self.distance] * len(self.alignment)
        reward = options.alignment * self.alignment - options.diversity * self.diversity
        scores: list[float] = {"reward": reward, "alignment": self.alignment, "diversity": self.diversity}[
            options.score
        ].tolist()
        return scores


def feature_matching(**given: Any) -> Callable[..., list[float]]:
    options = FeatureMatching(**given)
    network = _network(options.model_copy(update={"score": "reward"}).model_dump_json())

    def score_all(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        answers = right_answers(column_of(columns, options.column)[0], options.column)
        texts = [text_of(completion) for completion in completions]
        if None in texts:
            raise ValueError("a completion has several messages, and the features of one are compared")
        begin, best = network.begin(prompts[0]), min if options.score == "distance" else max
        scores = [network.match(begin, answer, tuple(map(str, texts))).score(options) for answer in answers]
        return list(map(best, zip(*scores, strict=True)))

    return score_all


@cache
def _network(options: str) -> "FeatureNetwork":
    """Return the network of these options, the same for entries that differ in `score`."""
    return FeatureNetwork(FeatureMatching.model_validate_json(options))


class FeatureNetwork:
    """A frozen model as features of texts. Raises ConfigError if it cannot be loaded, DeviceError for a GPU without room."""

    def __init__(self, options: FeatureMatching) -> None:
        if options.model is None:
            raise ConfigError("rewards.functions: feature_matching needs options.model outside of a run")
        self._options = options
        self._model, self._tokenizer = loaded(options.model, options, "AutoModel", lambda _config: None)
        if options.pooling == "completion_mean" and not self._tokenizer.is_fast:
            raise ConfigError(
                f"rewards.functions: the tokenizer of {options.model} does not tell completions from prompts"
            )
        self.match = lru_cache(_REMEMBERED)(self._match)

    def begin(self, prompt: Any) -> str:
        """Return the text before a completion."""
        if isinstance(prompt, str):
            return prompt
        return str(self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))

    def _match(self, begin: str, answer: str, completions: tuple[str, ...]) -> Match:
        features = self.features(begin, list(dict.fromkeys([answer, *completions])))
        group = np.stack([features[text] for text in completions])
        return Match.of(group, features[answer], whiten=self._options.whiten)

    def features(self, begin: str, texts: list[str]) -> dict[str, Features]:
        """Return the features of these texts behind a beginning, (d,). Raise ValueError if they are not finite."""
        whole = [begin + text for text in texts]
        found = {}
        asked = outputs(self._model, self._tokenizer, whole, self._options, output_hidden_states=True)
        for text, (output, row, num_tokens, starts) in zip(texts, asked, strict=True):
            states = output.hidden_states
            layers = [states[math.ceil(depth * (len(states) - 1))] for depth in self._options.feature_layers]
            pooled = self._pooled([layer[row, :num_tokens] for layer in layers], bisect_left(starts, len(begin)))
            found[text] = np.array(pooled, np.float64)
            if not np.isfinite(found[text]).all():
                raise ValueError("the model gave features that are not finite")
        return found

    def _pooled(self, layers: list[Any], first: int) -> list[float]:
        """Return the features of one text by the states of its tokens. `first`: where the completion begins."""
        import torch

        states = torch.cat([torch.nn.functional.normalize(layer.double(), dim=-1) for layer in layers], -1)
        count, width = states.shape
        states = states if count else states.new_zeros((1, width))
        match self._options.pooling:
            case "last_token":
                result = states[-1]
            case "mean":
                result = states.mean(0)
            case "completion_mean":
                result = states[first:].mean(0) if first < count else torch.zeros_like(states[0])
            case "concat":
                result = torch.cat([states[quarter * count // 4] for quarter in (1, 2, 3)])
        values: list[float] = result.tolist()
        return values


def _unit(features: Features) -> Features:
    sizes = np.linalg.norm(features, axis=-1, keepdims=True)
    result: Features = features / np.where(sizes > 0, sizes, 1)
    return result
