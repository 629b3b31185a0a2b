"""The sampler's log-probs are the model's, and staleness is exactly what was asked for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.lockstep import LockstepFeed, Policies, Sampler, greedy_accuracy
from consumer.app.setup import Setup
from protocol.config.functions import load_function
from protocol.config.run import RunConfig
from replay.groups import RolloutGroup
from tests.integration.models import build_model, random_adapter, reference_logprobs
from tests.unit.consumer.snapshots import snapshot

pytestmark = pytest.mark.long

PROMPTS = ["1+1=", "37+45=", "9=", "12345+1="]
STEPS, STALENESS, ROUNDS = 6, 2, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model("qwen2", tmp_path_factory.mktemp("lockstep") / "model")
    rows = [{"prompt": prompt, "answer": "2"} for prompt in PROMPTS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "def odd_length(completion_ids, **_):\n    return [float(len(ids) % 2) for ids in completion_ids]\n\n\n"
        "def nothing(completion_ids, **_):\n    return [0.0] * len(completion_ids)\n"
    )
    return folder


@pytest.fixture
def setup(model: Path, tmp_path: Path) -> Callable[..., Setup]:
    def load(seed: int = 1, reward: str = "odd_length") -> Setup:
        config = RunConfig.model_validate(
            {
                "run_dir": str(tmp_path),
                "seed": seed,
                "model": {"path": str(model), "dtype": "float32"},
                "dataset": {"path": str(model / "train.jsonl")},
                "rewards": {"functions": [{"function": f"{model}/rewards.py:{reward}"}]},
                "sampling": {"num_generations": 4, "max_completion_length": 5, "temperature": 0.7},
                "pipeline": {"groups_per_step": 3, "max_staleness": STALENESS},
                "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
                "trainer": {"max_steps": STEPS, "gradient_checkpointing": False},
            }
        )
        return Setup.load(config, [], lambda: False)

    return load


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [model.parent / f"adapter-{version}" for version in range(STEPS)]


@pytest.fixture(scope="module")
def blobs(model: Path, adapters: list[Path]) -> list[bytes]:
    return [random_adapter(model, folder, seed=version)[0] for version, folder in enumerate(adapters)]


def completions(group: RolloutGroup) -> list[tuple[list[int], torch.Tensor]]:
    lengths = group.completion_lengths.tolist()
    ids, logprobs = torch.tensor(group.completion_ids).split(lengths), torch.tensor(group.logprobs).split(lengths)
    return [(one.tolist(), values) for one, values in zip(ids, logprobs, strict=True)]


def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def run(setup: Setup, blobs: list[bytes], staleness: int = STALENESS) -> list[list[RolloutGroup]]:
    """The batches of a run whose step s publishes the s-th blob, however it was trained."""
    policies = Policies(staleness + 1, STEPS, lambda blob: 0.0)
    (chosen,) = setup.config.rewards.functions
    reward = load_function(str(chosen.function), "rewards")
    feed = LockstepFeed(setup, Sampler(setup), policies, staleness, ROUNDS, reward)
    policies.submit(0, 0, snapshot(blobs[0]))
    batches = []
    for step, batch in enumerate(feed):
        batches.append(batch.groups)
        if step + 1 < STEPS:
            policies.submit(step + 1, step + 1, snapshot(blobs[step + 1]))
    return batches


def test_log_probs_are_those_of_the_policy_that_the_staleness_names(
    setup: Callable[..., Setup], model: Path, blobs: list[bytes], adapters: list[Path]
) -> None:
    for step, groups in enumerate(run(setup(), blobs)):
        version = max(0, step - STALENESS)
        assert {group.policy_version for group in groups} == {version}
        group = groups[step % len(groups)]  # prompts of several lengths were padded beside it
        ids, logprobs = completions(group)[step % 4]
        expected = reference_logprobs(model, adapters[version], group.prompt_ids.tolist(), ids, temperature=0.7)
        rounding = torch.finfo(torch.float32).eps * expected.abs().max().item()
        torch.testing.assert_close(logprobs, expected, atol=100 * rounding, rtol=0)
        other = reference_logprobs(model, adapters[version + 1], group.prompt_ids.tolist(), ids, temperature=0.7)
        assert (logprobs - other).abs().max() > 1e-2


def test_prompts_and_noise_depend_on_the_seed_alone(setup: Callable[..., Setup], blobs: list[bytes]) -> None:
    def prompts(batches: list[list[RolloutGroup]]) -> list[list[str]]:
        return [[group.lease_id for group in batch] for batch in batches]

    rewards_of_nothing = {"reward": "nothing"}  # every group fills, so the batch is the first round
    stale, fresh = (run(setup(**rewards_of_nothing), blobs, staleness) for staleness in (STALENESS, 0))
    assert prompts(stale) == prompts(fresh)
    assert prompts(run(setup(seed=2, **rewards_of_nothing), blobs)) != prompts(stale)
    assert stale[0][0].completion_ids.tolist() == fresh[0][0].completion_ids.tolist()
    assert stale[-1][0].completion_ids.tolist() != fresh[-1][0].completion_ids.tolist()


def test_greedy_accuracy_counts_exact_answers(setup: Callable[..., Setup], blobs: list[bytes]) -> None:
    sampler = Sampler(setup())
    sampler.load(blobs[0])
    prompts = sampler.tokenizer(PROMPTS)["input_ids"]
    texts = sampler.tokenizer.batch_decode(sampler.sample(prompts, 1, 5, 1.0, None).ids, skip_special_tokens=True)
    rows = [{"prompt": prompt, "answer": text} for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert greedy_accuracy(sampler, rows, blobs[0], exact, 5) == 1.0
    assert greedy_accuracy(sampler, [rows[0] | {"answer": "never"}, *rows[1:]], blobs[0], exact, 5) == 0.75
