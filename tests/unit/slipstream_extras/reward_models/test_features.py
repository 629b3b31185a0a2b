"""Feature matching: its numbers by hand and in a second way, the features of a small model, and bad input."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from producer.rewards.services import WorkerReward, sources_of
from protocol.config.reward_options import FeatureMatching
from protocol.config.rewards import RewardFunction
from protocol.errors import ConfigError
from slipstream_extras.reward_models.features import FeatureNetwork, Match, feature_matching
from tests.integration.models import byte_bpe_tokenizer
from tests.unit.producer.rewards.test_rewards import section

GROUP = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
ANSWER = np.array([0.6, 0.8])


def scores(match: Match, **options: Any) -> list[float]:
    return match.score(FeatureMatching(model="m", **options))


def test_plain_features_by_hand() -> None:
    """Of unit length the group is (1, 0), (0, 1), (0, 1), and its mean is (1/3, 2/3)."""
    match = Match.of(GROUP, ANSWER, whiten=False)
    assert scores(match, score="alignment") == pytest.approx([0.6, 0.8, 0.8])
    assert scores(match, score="diversity") == pytest.approx([0.0, 0.5, 0.5])
    assert scores(match) == pytest.approx([0.6, 0.3, 0.3])
    assert scores(match, alignment=2.0, diversity=0.0) == pytest.approx([1.2, 1.6, 1.6])
    assert scores(match, score="distance") == pytest.approx([(1 / 3 - 0.6) ** 2 + (2 / 3 - 0.8) ** 2] * 3)


def test_whitened_features_by_hand() -> None:
    """The columns of the group have the lengths 2 and sqrt(10), so whitened it is (1, 0), (0, 1/sqrt 10), (0, 3/sqrt 10), and the
    answer (0.3, 0.8/sqrt 10)."""
    match = Match.of(GROUP, ANSWER, whiten=True)
    length = np.sqrt(0.09 + 0.064)
    assert scores(match, score="alignment") == pytest.approx(
        [0.3 / length, np.sqrt(0.064) / length, np.sqrt(0.064) / length]
    )
    assert scores(match, score="diversity") == pytest.approx([0.0, 0.15, 0.15])
    mean = np.array([1 / 3, 4 / 3 / np.sqrt(10)])
    distance = np.square(mean - [0.3, 0.8 / np.sqrt(10)]).sum()
    assert scores(match, score="distance") == pytest.approx([distance] * 3)


def test_equal_completions_are_near_each_other_also_when_whitened() -> None:
    """Whitened, the others of a group of different ones are orthogonal, and each of two equal ones has half of a unit."""
    group = np.random.default_rng(0).normal(size=(4, 50))
    assert scores(Match.of(group, group[0], whiten=True), score="diversity") == pytest.approx([0.0] * 4, abs=1e-12)
    group[1] = group[0]
    found = scores(Match.of(group, group[0], whiten=True), score="diversity")
    assert found == pytest.approx([1 / 6, 1 / 6, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("whiten", [True, False])
def test_a_group_of_one_has_a_cosine_and_no_others(whiten: bool) -> None:
    match = Match.of(GROUP[:1], ANSWER, whiten=whiten)
    assert scores(match) == pytest.approx([0.6])
    assert scores(match, score="diversity") == [0.0]
    assert scores(match, score="distance") == pytest.approx([0.4**2 + 0.8**2])


@pytest.mark.parametrize("whiten", [True, False])
def test_features_of_zero_match_nothing(whiten: bool) -> None:
    match = Match.of(np.zeros((3, 2)), ANSWER, whiten=whiten)
    assert scores(match) == [0.0] * 3
    assert scores(Match.of(GROUP, np.zeros(2), whiten=whiten), score="alignment") == [0.0] * 3


def second(group: np.ndarray, answer: np.ndarray, whiten: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """By W = (phi^T phi)^(-1/2) of the eigenvalues of the covariance, and loops."""
    n, d = group.shape
    if whiten:
        values, vectors = np.linalg.eigh(sum(np.outer(phi, phi) for phi in group))
        root = np.zeros((d, d))
        for value, vector in zip(values, vectors.T, strict=True):
            if value > 1e-10 * values.max():
                root += np.outer(vector, vector) / np.sqrt(value)
        group, answer = np.array([root @ phi for phi in group]), root @ answer
    else:
        group, answer = np.array([phi / np.sqrt(phi @ phi) for phi in group]), answer / np.sqrt(answer @ answer)
    alignment = [phi @ answer / np.sqrt((phi @ phi) * (answer @ answer)) for phi in group]
    others = [sum(group[i] @ group[j] for j in range(n) if j != i) / (n - 1) for i in range(n)]
    return np.array(alignment), np.array(others), float(np.linalg.norm(sum(group) / n - answer) ** 2)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (2, 30), (5, 5)])
@pytest.mark.parametrize("whiten", [True, False])
def test_a_second_way_comes_to_the_same(shape: tuple[int, int], whiten: bool) -> None:
    draw = np.random.default_rng(shape[0])
    group, answer = draw.normal(size=shape) * draw.uniform(0.1, 10, size=shape[1]), draw.normal(size=shape[1])
    match, (alignment, others, distance) = Match.of(group, answer, whiten=whiten), second(group, answer, whiten)
    np.testing.assert_allclose(match.alignment, alignment, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(match.diversity, others, rtol=1e-10, atol=1e-10)
    assert match.distance == pytest.approx(distance, rel=1e-10)
    weighed = scores(match, alignment=0.7, diversity=0.2)
    np.testing.assert_allclose(weighed, 0.7 * alignment - 0.2 * others, rtol=1e-10, atol=1e-10)


# A model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("base"), byte_bpe_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(**shape, **ids, num_key_value_heads=1, initializer_range=0.5)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


TEXTS = ["five.", "The sum is two, 你好!", "five.", "I think it is five, two and three."]


def features(folder: Path, text: str, layers: list[int], pooling: str, begin: str) -> np.ndarray:
    """By the model alone, without padding, and in numpy."""
    tokenizer = byte_bpe_tokenizer()
    ids = tokenizer(begin + text, add_special_tokens=False)["input_ids"]
    first = len(tokenizer(begin, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        states = Qwen2Model.from_pretrained(folder).eval()(torch.tensor([ids]), output_hidden_states=True).hidden_states
    chosen = [states[layer][0].double().numpy() for layer in layers]
    parts = np.concatenate([layer / np.linalg.norm(layer, axis=1, keepdims=True) for layer in chosen], 1)
    n = len(ids)
    return {
        "last_token": parts[-1],
        "mean": parts.mean(0),
        "completion_mean": parts[first:].mean(0),
        "concat": np.concatenate([parts[n // 4], parts[n // 2], parts[3 * n // 4]]),
    }[pooling]


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["last_token", "mean", "completion_mean", "concat"])
def test_features_are_the_models_own(folder: Path, pooling: str) -> None:
    options = {"model": str(folder), "pooling": pooling, "feature_layers": [0.3, 0.5, 1.0], "batch_size": 2}
    chat = [{"role": "user", "content": "What is the sum?"}]
    for prompt, begin, completions in (
        ("2+3=", "2+3=", TEXTS),
        (chat, "<|user|>What is the sum?<|end|><|assistant|>", [[{"role": "assistant", "content": t}] for t in TEXTS]),
    ):
        wanted = [features(folder, text, [1, 2, 3], pooling, begin) for text in [*TEXTS, "The sum is five."]]
        for score, whiten in (("reward", True), ("alignment", False), ("diversity", False)):
            function = feature_matching(**options, score=score, whiten=whiten)
            found = function([prompt] * 4, completions, answer=["The sum is five."] * 4, completion_ids=[[1]] * 4)
            match = Match.of(np.array(wanted[:4]), wanted[4], whiten=whiten)
            assert found == pytest.approx(scores(match, score=score), abs=1e-4)
            assert found[0] == found[2]


@pytest.mark.long
def test_entries_that_differ_in_their_score_compute_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    asked = FeatureNetwork.features
    monkeypatch.setattr(FeatureNetwork, "features", lambda self, *given: calls.append(given) or asked(self, *given))
    functions = [
        feature_matching(model=str(folder), max_length=99, score=s) for s in ("reward", "alignment", "distance")
    ]
    first = [function(["2+3="] * 2, ["5", "6"], answer=["5"] * 2) for function in functions]
    assert len(calls) == 1
    assert first[1][0] > first[1][1]
    functions[0](["2+3="] * 2, ["5", "7"], answer=["5"] * 2)
    assert len(calls) == 2


@pytest.mark.long
def test_a_completion_of_nothing(folder: Path) -> None:
    same = feature_matching(model=str(folder), whiten=False, score="alignment")
    assert same(["2+3="] * 2, ["", "5"], answer=["5"] * 2)[1] == pytest.approx(1.0)
    mean = feature_matching(model=str(folder), pooling="completion_mean", whiten=False, score="alignment")
    assert mean(["2+3="] * 2, ["", "5"], answer=["5"] * 2) == pytest.approx([0.0, 1.0])


@pytest.mark.long
def test_the_nearest_of_several_answers_counts(folder: Path) -> None:
    for score, best in (("alignment", max), ("distance", min)):
        function = feature_matching(model=str(folder), whiten=False, score=score)
        one, other, both = (function(["2+3="] * 2, ["5", "6"], answer=[a] * 2) for a in ("5", "6", ["5", 6]))
        assert both == pytest.approx([best(pair) for pair in zip(one, other, strict=True)])


@pytest.mark.long
def test_what_cannot_be_matched(folder: Path, tmp_path: Path) -> None:
    function = feature_matching(model=str(folder))
    with pytest.raises(KeyError, match=r"no column 'answer'; set options.column to one of: solution"):
        function(["p"], ["x"], solution=["x"])
    with pytest.raises(ValueError, match="column 'answer' has None"):
        function(["p"], ["x"], answer=[None])
    with pytest.raises(ValueError, match="several messages"):
        function(["p"], [[{"role": "assistant", "content": "x"}] * 2], answer=["x"])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        feature_matching(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs options\.model"):
        feature_matching()


# The section.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"feature_layers": []}, "feature_layers"),
        ({"feature_layers": [0.0]}, "feature_layers.0"),
        ({"feature_layers": [0.5, 1.01]}, "feature_layers.1"),
        ({"pooling": "max"}, "pooling"),
        ({"diversity": -1}, "diversity"),
        ({"score": "cosine"}, "score"),
        ({"layers": [0.5]}, "layers"),
    ],
)
def test_what_is_no_option(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"options.{said}")):
        RewardFunction.model_validate({"function": "feature_matching", "options": options})


def test_the_base_of_the_run_is_the_frozen_model_and_alike_entries_share_its_process() -> None:
    entries: list[dict[str, Any]] = [
        {"function": "feature_matching"},
        {"function": "feature_matching", "name": "near", "weight": 0, "options": {"score": "alignment"}},
        {"function": "a:b"},
        {"function": "feature_matching", "name": "other", "options": {"model": "org/other"}},
        {"function": "feature_matching", "name": "mean", "options": {"pooling": "mean"}},
        {"posted": "solved"},
    ]
    rewards = section(*entries).computed("org/base", "main")
    assert [each.options.get("model") for each in rewards.functions] == [
        "org/base",
        "org/base",
        None,
        "org/other",
        "org/base",
    ]
    assert [each.options.get("revision") for each in rewards.functions] == ["main", "main", None, None, "main"]
    sources = [source for source in sources_of(rewards) if isinstance(source, WorkerReward)]
    first, near, mine, other, mean = sources
    assert first.workers is near.workers
    assert (first.number, near.number, other.number, mean.number) == (0, 1, 0, 0)
    assert len({id(source.workers) for source in (first, mine, other, mean)}) == 4
