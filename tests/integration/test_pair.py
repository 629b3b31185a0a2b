"""The real pair: real vLLM, real TRL, real sockets, two processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from protocol.runtime import json_lines as rotated_lines
from protocol.runtime.scratch import PREFIX
from tests.integration.engines import NUM_BLOCKS
from tests.integration.models import build_model, reference_logprobs
from tests.integration.pair import Daemon, end_well, gone, run_pair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REWARD = "def various(completions, **_):\n    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
"""Of random completions: no group is without signal."""
CHAT_REWARD = "def length(completions, **_):\n    return [float(len(c[0]['content'])) for c in completions]\n"


def write_run(folder: Path, family: str, rows: list[dict], reward: str, **sections: Any) -> Path:
    """A complete run in `folder`; returns its configuration file."""
    build_model(family, folder / "model")
    (folder / "rewards.py").write_text(reward)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = reward.partition("def ")[2].split("(")[0]
    config = {
        "run_dir": str(folder / "run"),
        "seed": 3,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "dataset": {"path": str(folder / "data.jsonl")},
        "rewards": {"functions": [{"function": f"{folder}/rewards.py:{name}"}], "num_workers": 1},
        "sampling": {"num_generations": 4, "max_completion_length": 8},
        "pipeline": {"groups_per_step": 4, "max_staleness": 2, "fill": "full"},
        "transport": {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 3.0},
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "engine": {
            "max_model_len": 128,
            "max_num_seqs": 32,
            "enforce_eager": True,
            "num_gpu_blocks_override": NUM_BLOCKS,
        },
        "trainer": {"max_steps": 30, "learning_rate": 1e-3, "gradient_checkpointing": False, "save_steps": 5},
    }
    for section, values in sections.items():
        config[section] = config.get(section, {}) | values if isinstance(values, dict) else values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def read_steps(folder: Path) -> list[dict]:
    return rotated_lines.read(folder / "run" / "steps.jsonl")


def versions_trained_on(folder: Path) -> list[set[int]]:
    """Of each completion that was trained. Every token has the log-prob that the checkpoint of its version gives it."""
    exported, found = folder / "trained.jsonl", []
    command = [sys.executable, "-m", "slipstream", "journal", "--run", str(folder / "run"), "export"]
    subprocess.run([*command, "--state", "trained", "--to", str(exported)], check=True, timeout=60)
    for group in map(json.loads, exported.read_text().splitlines()):
        completions = zip(group["completion_ids"], group["logprobs"], group["token_versions"], strict=True)
        for ids, logprobs, of_tokens in completions:
            assert of_tokens == sorted(of_tokens)
            for version in set(of_tokens):
                adapter = folder / "run" / "checkpoints" / f"checkpoint-{version}" if version else None
                expected = reference_logprobs(folder / "model", adapter, group["prompt_ids"], ids, 1.0)
                its_own = torch.tensor([one == version for one in of_tokens])
                torch.testing.assert_close(torch.tensor(logprobs)[its_own], expected[its_own], atol=1e-3, rtol=0)
            found.append(set(of_tokens))
    return found


def status(run_dir: Path) -> dict:
    """What `slipstream status` says now."""
    command = [sys.executable, "-m", "slipstream", "status", "--run", str(run_dir), "--once", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)


def test_each_waits_for_the_other_and_training_goes_on(short_dir: Path, daemons: list[Daemon]) -> None:
    rows = [{"prompt": f"{i}+1="} for i in range(40)]
    config = str(write_run(short_dir, "qwen2", rows, REWARD, trainer={"max_steps": 1_000_000}))

    producer = Daemon("producer.app.cli", short_dir / "producer-1.log", "--config", config, spawns=True)
    daemons.append(producer)
    trainer = Daemon("consumer.app.cli", short_dir / "trainer-1.log", "--config", config)
    daemons.append(trainer)
    trainer.wait_for(r"listening at .*waiting for producers")
    trainer.wait_for(r"step 8/", beside=producer)
    producer.wait_for(r"policy v([5-9]|\d\d+) is live")

    seen = status(short_dir / "run")
    assert seen["trainer"]["step"] >= 8
    assert seen["trainer"]["not_ready"] == seen["producers"][0]["not_ready"] == {}
    assert seen["trainer"]["prompts_differ"] == 0
    assert seen["producers"][0]["policy_version"] >= 5
    assert 0.0 <= seen["trainer"]["wait_share"] <= 1.0
    assert seen["producers"][0]["tokens_per_s"] > 0
    assert [point["step"] for point in seen["rewards"]][:8] == list(range(1, 9))

    family = producer.family()
    assert len(family) >= 3, "engine core and reward worker are processes of their own"
    sockets = {Path(s.laddr) for member in family for s in member.net_connections("unix") if s.laddr[:1] == "/"}
    assert sockets, "the engine core is reached over sockets"
    assert all(path.parent.name.startswith(PREFIX) for path in sockets), "where the next producer cleans up"
    producer.kill()
    assert gone(family), "the engine core and the reward worker end with their daemon"
    trainer.wait_for(
        r"producer \S+ left \((silent for|it cannot be reached|its connection ended).*prompts go out again"
    )
    trainer.wait_for(r"no producer is connected")
    seen = status(short_dir / "run")
    assert seen["producers"][0]["error"] == "the process exited unexpectedly"
    assert {"daemon_gone", "not_ready"} <= {warning["name"] for warning in seen["warnings"]}

    producer = Daemon("producer.app.cli", short_dir / "producer-2.log", "--config", config)
    daemons.append(producer)
    producer.wait_for(r"connected to the trainer")
    before = len(read_steps(short_dir))
    trainer.wait_for(rf"step {before + 5}/", beside=producer)

    trainer.kill()
    producer.wait_for(r"(?i)trainer.*(silent|lost|gone)")
    assert producer.process.poll() is None
    committed = max(
        int(path.parent.name.rpartition("-")[2])
        for path in (short_dir / "run").glob("checkpoints/*/pipeline_state.json")
    )
    refused = Daemon("consumer.app.cli", short_dir / "trainer-refused.log", "--config", config)
    assert refused.end() == 78
    assert "--resume" in refused.output

    resumed = Daemon(
        "consumer.app.cli",
        short_dir / "trainer-2.log",
        *("--config", config, "--resume", "--set", f"trainer.max_steps={committed + 10}"),
    )
    daemons.append(resumed)
    end_well(resumed, producer)
    steps = [line["step"] for line in read_steps(short_dir)]
    assert steps[-10:] == list(range(committed + 1, committed + 11)), "it went on from the checkpoint, one by one"
    assert (short_dir / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_without_staleness_the_run_is_on_policy(short_dir: Path, daemons: list[Daemon]) -> None:
    """A Llama with byte-level BPE and a chat template; every group is trained on the version that generated it, which is
    merged into the engine's weights."""
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} and three?"}]} for i in range(20)]
    config = str(
        write_run(
            short_dir,
            "llama",
            rows,
            CHAT_REWARD,
            pipeline={"max_staleness": 0},
            swap={"mode": "merged"},
            trainer={"max_steps": 8},
            correction={"ratio_max": 100.0},
        )
    )
    run_pair(short_dir, config, daemons)
    steps = read_steps(short_dir)
    assert [line["policy_version"] for line in steps] == list(range(8))
    for line in steps:
        assert line["staleness/max"] == line["staleness/mean"] == 0.0
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=2e-4)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=2e-4)
    assert steps[-1]["counts"]["trained"] == 8 * 4


def test_completions_go_on_through_swaps_and_are_trained_token_by_token(short_dir: Path, daemons: list[Daemon]) -> None:
    """Each token's log-prob is that of the checkpoint of the version which it names, in the journal that is trained from."""
    config = str(
        write_run(
            short_dir,
            "qwen2",
            [{"prompt": f"{i}+1="} for i in range(40)],
            REWARD,
            sampling={"max_completion_length": 120},
            engine={"max_model_len": 160},
            pipeline={"max_staleness": 4, "groups_per_step": 2},
            swap={"in_flight": "continue"},
            trainer={"max_steps": 8, "save_steps": 1},
        )
    )
    run_pair(short_dir, config, daemons)

    steps = read_steps(short_dir)
    assert steps[-1]["counts"]["trained"] == 8 * 2
    assert max(line["staleness/newer_token_share"] for line in steps) > 0
    assert any(len(versions) > 1 for versions in versions_trained_on(short_dir))
