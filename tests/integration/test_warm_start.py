"""From a supervised warm start to checkpoints that PEFT and vLLM load, with the real commands."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from producer.engine_contract import Adapter
from protocol.wire.messages import Sampling
from tests.integration.engines import live_engine
from tests.integration.models import random_adapter, reference_logprobs

from .pair import Daemon
from .runs import Run

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_rl_sft_writes_an_adapter_that_knows_the_rows(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(sft={"completion_column": "answer", "max_steps": 40, "learning_rate": "1e-2", "logging_steps": 20})
    rows = [{"prompt": f"{i}+{i}=", "answer": "seven", "other": i} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--config", str(run.config_file)]
    command = Daemon("slipstream", tmp_path / "sft.log", "sft", *arguments)
    run.stack.callback(command.close)
    assert command.end(240) == 0, command.output
    folder = Path(run.config.run_dir) / "sft"
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "slipstream sft: 20 rows" in command.output
    assert "step 40/40  loss" in command.output
    vocabulary = json.loads((run.model / "tokenizer.json").read_text())["model"]["vocab"]
    prompt, completion = ([vocabulary[c] for c in text] for text in ("3+3=", "seven"))
    completion.append(vocabulary["<eos>"])
    before = reference_logprobs(run.model, None, prompt, completion, 1.0)
    after = reference_logprobs(run.model, folder, prompt, completion, 1.0)
    assert before.mean() < -2
    assert after.mean() > -0.2
    again = Daemon("slipstream", tmp_path / "again.log", "sft", *arguments)
    assert again.end(240) == 78
    assert f"--to: {folder} exists already" in again.output


def test_a_run_begins_at_the_adapter_and_its_checkpoints_are_plain_ones(
    start: Callable[..., Run], tmp_path: Path, trained_model: Path
) -> None:
    """Without a learning rate nothing may move: neither the policy nor its distance from the reference."""
    folder = tmp_path / "warm"
    random_adapter(trained_model, folder, rank=4)
    trainer_section = {"max_steps": 2, "save_steps": 2, "learning_rate": 0.0, "beta": 0.1}
    run = start(lora={"init_from": str(folder)}, trainer=trainer_section)
    producer = run.producer()
    trainer = run.trainer()
    assert trainer.end() == 0, trainer.output
    producer.join(10)
    wanted = tensors(folder)
    checkpoint = run.checkpoint(2)
    for made in (checkpoint, Path(run.config.run_dir) / "adapter"):
        found = tensors(made)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert run.column("kl") == pytest.approx([0.0, 0.0], abs=1e-9)

    random_adapter(trained_model, folder, rank=4, seed=1)
    refused = run.trainer("--resume")
    assert refused.end() == 78
    assert "lora.init_from differs from that of" in refused.output

    with live_engine(trained_model, tmp_path / "engine") as live:

        async def sample() -> list:
            adapter = Adapter(1, "checkpoint", 1, checkpoint)
            await live.engine.weights.load(adapter)
            return await live.engine.generate(PROMPT, Sampling(2, 12, 1.0), adapter)

        for completion in live.run(sample()):
            expected = reference_logprobs(trained_model, checkpoint, PROMPT, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)
