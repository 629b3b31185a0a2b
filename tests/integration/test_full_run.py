"""Runs in which the weights themselves train: the daemons as processes, killed, taken up again, and trained by several ranks."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protocol.config.loader import load_config
from protocol.wire import weight_patch
from replay.journal.reader import JournalReader
from slipstream import export
from slipstream.run_reader import EVALUATIONS, RunReader
from tests.weight_patches import patch_between

from .pair import Daemon, run_pair
from .runs import Run
from .test_pair import REWARD, read_steps, write_run
from .test_recovery import adapters, train_again

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

FULL: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "lora": None}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a model as transformers loads it; its files are in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    return dict(model.named_parameters())


def weights(run_dir: Path) -> dict[str, str]:
    """Digest of all weights that the run kept, by their folder's name."""
    files = [*run_dir.glob("checkpoints/checkpoint-*/model.safetensors"), run_dir / "model/model.safetensors"]
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_pair_trains_the_weights_themselves(short_dir: Path, daemons: list[Daemon]) -> None:
    """Every version is proved and sampled with, and what is left at the end is the last of them."""
    (short_dir / "held-out.jsonl").write_text('{"prompt": "2+3="}\n{"prompt": "4+5="}\n')
    file = write_run(
        short_dir,
        "qwen2",
        [{"prompt": f"{i}+1="} for i in range(20)],
        REWARD,
        **FULL,
        pipeline={"max_staleness": 0, "groups_per_step": 2},
        trainer={"max_steps": 4, "learning_rate": 2e-3, "save_steps": 2},
        evaluation={"dataset": {"path": str(short_dir / "held-out.jsonl")}, "every_versions": 2, "keep_best": True},
    )
    run_pair(short_dir, str(file), daemons)
    steps, run_dir = read_steps(short_dir), short_dir / "run"
    assert [line["policy_version"] for line in steps] == [0, 1, 2, 3]
    assert min(line["sampling/importance_sampling_ratio/effective_sample_share"] for line in steps) > 0.99

    model = AutoModelForCausalLM.from_pretrained(short_dir / "model", dtype=torch.bfloat16)
    base = dict(model.named_parameters())
    final, config = loaded(run_dir / "model"), load_config(str(file))
    assert all(not torch.equal(each, base[name]) for name, each in final.items()), "all parameters moved"
    evaluations = {line["version"]: line for line in RunReader(run_dir).lines(EVALUATIONS)}
    assert evaluations[4]["digest"] == weight_patch.pack(patch_between(base, final))[1]

    (best,) = weight_patch.read(run_dir / "checkpoints" / "best", None)
    for which in ("best", "last"):
        to = short_dir / which
        assert export.run(config, [], which=which, to=to, repository=None) == 0
        exported = loaded(to)
        if which == "best":
            assert patch_between(base, exported) == best
        else:
            assert all(torch.equal(each, final[name]) for name, each in exported.items())


def test_the_pair_trains_an_adapter_that_vllm_cannot_serve(short_dir: Path, daemons: list[Daemon]) -> None:
    """The engine's log-probs are the trainer's on every version, and what is exported is the last of them."""
    (short_dir / "held-out.jsonl").write_text('{"prompt": "2+3="}\n')
    file = write_run(
        short_dir,
        "llama",  # whose head is a tensor of its own
        [{"prompt": f"{i}+1="} for i in range(20)],
        REWARD,
        model={"dtype": "bfloat16"},
        lora={"use_dora": True, "modules_to_save": ["lm_head"]},
        pipeline={"max_staleness": 0, "groups_per_step": 2},
        trainer={"max_steps": 3, "learning_rate": 5e-3},
        evaluation={"dataset": {"path": str(short_dir / "held-out.jsonl")}, "every_versions": 3},
    )
    run_pair(short_dir, str(file), daemons)
    steps = read_steps(short_dir)
    assert [line["policy_version"] for line in steps] == [0, 1, 2]
    ratios = "sampling/importance_sampling_ratio"
    assert min(line[f"{ratios}/effective_sample_share"] for line in steps) > 0.99
    assert export.run(load_config(str(file)), [], which="last", to=short_dir / "merged", repository=None) == 0
    model = AutoModelForCausalLM.from_pretrained(short_dir / "model", dtype=torch.bfloat16)
    base, merged = dict(model.named_parameters()), loaded(short_dir / "merged")
    assert {name for name, each in merged.items() if torch.equal(each, base[name])} == {
        name for name in base if "norm" in name or "embed" in name
    }
    evaluations = {line["version"]: line for line in RunReader(short_dir / "run").lines(EVALUATIONS)}
    assert evaluations[3]["digest"] == weight_patch.pack(patch_between(base, merged))[1]


def test_a_killed_run_of_whole_weights_ends_as_one_that_never_was(start: Callable[..., Run]) -> None:
    run = start(**FULL, replay={"keep_all": True}, trainer={"max_steps": 6, "save_steps": 2})
    run.producer(changes={"dtype": "bfloat16"})
    trainer = run.trainer()
    run.wait_for_step(3)
    trainer.kill()
    assert run.trainer("--resume").end(120) == 0
    assert run.column("step") == list(range(1, 7))
    killed = weights(Path(run.config.run_dir))
    assert set(killed) == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "model"}
    assert len(set(killed.values())) == 4, "every version differs, and the final model is in 16 bits"
    assert killed == weights(train_again(run))
    with closing(JournalReader(run.config.journal_file)) as reader:
        trained = [lease_id for batch in reader.batches() for lease_id in batch.lease_ids]
    assert len(trained) == len(set(trained)) == 6 * 2


def test_a_killed_run_of_two_ranks_that_merge_ends_as_one_that_never_was(start: Callable[..., Run]) -> None:
    """Each rank takes the beginning of PiSSA out of its own base."""
    lora = {"init_lora_weights": "pissa", "use_dora": True}
    run = start(
        model={"dtype": "bfloat16"}, lora=lora, replay={"keep_all": True}, trainer={"max_steps": 4, "save_steps": 2}
    )
    run.producer(changes={"dtype": "bfloat16"})
    trainer = run.trainer("--ranks", "2")
    run.wait_for_step(3)
    trainer.kill()
    resumed = run.trainer("--ranks", "2", "--resume")
    assert resumed.end(120) == 0, resumed.output
    assert run.column("step") == [1, 2, 3, 4]
    killed = adapters(Path(run.config.run_dir))
    assert len(set(killed.values())) == 2
    assert killed == adapters(train_again(run, "--ranks", "2"))


def test_ranks_that_share_whole_weights_train_them_as_one_does(start: Callable[..., Run]) -> None:
    """Two are killed, and three others go on. Without autocast, so that the order of sums moves few bits."""
    options = {"optim": "sgd", "learning_rate": 0.1, "bf16": False}
    run = start(**FULL, replay={"keep_all": True}, trainer={"max_steps": 4, "save_steps": 2} | options)
    run.producer(changes={"dtype": "bfloat16"})
    trainer = run.trainer("--ranks", "2")
    run.wait_for_step(3)
    trainer.kill()
    resumed = run.trainer("--ranks", "3", "--resume")
    assert resumed.end(120) == 0, resumed.output
    assert "the weights lie on 2 ranks" in trainer.output
    assert "the weights lie on 3 ranks" in resumed.output
    assert run.column("step") == [1, 2, 3, 4]
    alone = load_file(train_again(run) / "checkpoints/checkpoint-4/model.safetensors")
    before = load_file(run.checkpoint(2) / "model.safetensors")
    for name, found in load_file(run.checkpoint(4) / "model.safetensors").items():
        assert (found - before[name]).abs().max() > 1e-4
        torch.testing.assert_close(found, alone[name], rtol=0, atol=2e-6)
