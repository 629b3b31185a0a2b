"""What a user can get wrong with `rl-trainer`: each ends with a named exit code and words that say what to mend."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from consumer import cli
from protocol.config.loader import load_config
from protocol.transport.zeromq_client import ZmqClient
from protocol.wire.digests import base_model_digest, tokenizer_digest
from protocol.wire.messages import Group, Lease, Nack
from tests.scripted import ScriptedProducer, facts

from .models import build_model
from .pair import Daemon

pytestmark = pytest.mark.integration

RUN = {
    "run_dir": "run",
    "model": {"path": "model", "dtype": "float32"},
    "dataset": {"path": "train.jsonl"},
    "rewards": {"functions": [{"function": "rewards:reward"}]},
    "sampling": {"num_generations": 4, "max_completion_length": 6},
    "pipeline": {"groups_per_step": 2},
    "lora": {"r": 4},
    "trainer": {"max_steps": 2, "gradient_checkpointing": False},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is in order but for its model, which is an empty folder that looks like one."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n' * 8)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path


def rl_trainer(folder: Path, *arguments: str, gpu: str = "cpu") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "consumer.cli", "--config", "run.yaml", "--gpu", gpu, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["consumer.daemon"])


def _main(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = ["rl-trainer", "--config", "run.yaml", "--gpu", "cpu", *arguments]
    cli.main()


def warm_rl_trainer(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The same as a fork of a process that has imported torch and TRL already, which takes most of the time."""
    process = _WARM.Process(target=_main, args=(folder, list(arguments)))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    output, errors = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, process.exitcode, output, errors)


def change(folder: Path, **sections: Any) -> None:
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in RUN.items()}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


def assert_refused(result: "subprocess.CompletedProcess[str]", code: int, words: str) -> None:
    assert words in result.stderr
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("rl-trainer: error: ")
    assert "Traceback" not in result.stderr


# Before any heavy library is imported.


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--config", "absent.yaml"], 78, "absent.yaml: no such file. Give one with --config"),
        (["--set", "pipeline.max_stalenes=1"], 78, "unknown key `max_stalenes`; did you mean `max_staleness`?"),
        (
            ["--set", "pipeline.max_staleness=soon"],
            78,
            "pipeline.max_staleness: expected an integer from 0 to 64, or `auto`",
        ),
        (["--set", "lora.r=1024"], 78, "`r: 1024` cannot be served: vLLM's largest LoRA rank is 512"),
        (["--set", "sampling.top_p=0.9"], 78, "Remove it, or set sampling.accept_biased_ratios=true"),
        (["--set", "sampling.top_k=50"], 78, "top_k=50 changes the sampling distribution"),
        (["--set", "transport.endpoint=tcp://0.0.0.0:5557"], 78, "0.0.0.0 can be reached from other hosts"),
        (["--set", "trainer.num_generations=4"], 78, "set sampling.num_generations instead"),
        (["--set", "trainer.per_device_train_batch_size=3"], 78, "set pipeline.trainer_tokens_per_micro_batch"),
        (["--gpu", "9"], 71, "--gpu 9: GPU 9 does not exist, this machine has"),
        (["--gpu", "first"], 71, "--gpu first: expected an index such as 0, a list such as 0,1, or cpu"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_refused_at_once(folder: Path, arguments: list[str], code: int, words: str) -> None:
    assert_refused(rl_trainer(folder, *arguments), code, words)


def test_an_unknown_flag_is_a_usage_error(folder: Path) -> None:
    result = rl_trainer(folder, "--restart")
    assert result.returncode == 2
    assert "unrecognized arguments: --restart" in result.stderr


# By TRL and PEFT, before a model is loaded.


def test_check_full_asks_trl_what_only_trl_knows(folder: Path) -> None:
    change(folder, trainer={"lr_scheduler_type": "sinus"})
    assert_refused(
        warm_rl_trainer(folder, "--check", "full"), 78, "trainer: refused by trl.GRPOConfig: sinus is not a valid"
    )
    assert warm_rl_trainer(folder, "--check").returncode == 0, "the quick check does not ask it"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("lora.lora_alfa=8", "lora.lora_alfa: unknown to peft.LoraConfig; did you mean `lora_alpha`?"),
        ("trainer.learning_rates=1e-5", "unknown to trl.GRPOConfig; did you mean `learning_rate`?"),
    ],
)
def test_a_key_that_the_library_does_not_know_ends_the_run_before_it_begins(
    folder: Path, value: str, words: str
) -> None:
    assert_refused(warm_rl_trainer(folder, "--set", value), 78, words)


def test_a_value_that_trl_refuses_ends_the_run_before_it_begins(folder: Path) -> None:
    change(folder, trainer={"loss_type": "ppo"})
    assert_refused(warm_rl_trainer(folder), 78, "trainer.loss_type: 'ppo' is not one that TRL knows")


# The dataset and the model.


@pytest.mark.parametrize(
    ("section", "content", "words"),
    [
        ({"path": "absent.jsonl"}, None, "dataset.path: there is no file absent.jsonl (looked from "),
        ({"path": "empty.jsonl"}, "", "dataset.path: empty.jsonl, split train, has no rows"),
        ({"path": "other.jsonl"}, '{"question": "1+1="}\n', "other.jsonl has no column 'prompt'; it has 'question'"),
    ],
    ids=["missing", "empty", "no prompt column"],
)
def test_a_dataset_without_prompts(folder: Path, section: dict[str, Any], content: str | None, words: str) -> None:
    if content is not None:
        (folder / section["path"]).write_text(content)
    change(folder, dataset=section)
    assert_refused(warm_rl_trainer(folder), 65, words)


def test_a_model_folder_that_is_missing(folder: Path) -> None:
    assert_refused(
        warm_rl_trainer(folder, "--set", "model.path=/absent/model"), 78, "model.path: /absent/model does not exist"
    )


def test_a_model_folder_that_holds_no_model(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("{}")
    assert_refused(warm_rl_trainer(folder), 78, "model.path: transformers cannot read model/config.json: ")


# With a model and a peer.


class Pair:
    """A trainer process on a real small model, and scripted producers for it."""

    def __init__(self, folder: Path, model: Path, short_dir: Path, stack: ExitStack) -> None:
        self.folder, self.model, self.stack = folder, model, stack
        change(
            folder,
            run_dir=str(folder / "run"),
            model={"path": str(model)},
            dataset={"path": str(folder / "train.jsonl")},
            transport={"endpoint": f"ipc://{short_dir}/control.ipc"},
        )
        self.config = load_config(str(folder / "run.yaml"))

    def trainer(self, *arguments: str) -> Daemon:
        daemon = Daemon(
            "consumer.cli", self.folder / "trainer.log", "--config", str(self.folder / "run.yaml"), *arguments
        )
        self.stack.callback(daemon.kill)
        return daemon

    def producer(
        self, name: str = "p", answer: Callable[..., Group | Nack] | None = None, **changes: Any
    ) -> ScriptedProducer:
        digests = {
            "base_model_digest": base_model_digest(self.model),
            "tokenizer_digest": tokenizer_digest(self.model),
        }
        channel = ZmqClient(name, self.config.control_endpoint, self.config.blob_endpoint, 2**26)
        options = {"answer": answer} if answer else {}
        producer = ScriptedProducer(channel, facts(**(digests | changes)), name=name, **options).start()
        self.stack.callback(producer.stop)
        return producer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture
def pair(folder: Path, model: Path, short_dir: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(folder, model, short_dir, stack)


def test_target_modules_that_the_model_does_not_have(pair: Pair) -> None:
    trainer = pair.trainer("--set", "lora.target_modules=[qkv]")
    assert trainer.end() == 78
    assert (
        "rl-trainer: error: TRL or PEFT refused to build the trainer: Target modules {'qkv'} not found"
        in trainer.output
    )
    assert "Traceback" not in trainer.output


def test_a_dataset_that_changed_since_the_checkpoint(pair: Pair) -> None:
    ledger = {"epoch": 0, "position": 3, "num_prompts": 7, "unsettled": []}
    checkpoint = pair.folder / "run" / "checkpoints" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    state = {"step": 3, "run_id": "run", "ledger": ledger, "counts": {}, "journal_seq": 0}
    (checkpoint / "pipeline_state.json").write_text(json.dumps(state))
    trainer = pair.trainer("--resume")
    assert trainer.end() == 65
    assert "the dataset has 8 prompts now and had 7 at the checkpoint; go on with the old one" in trainer.output
    assert "Traceback" not in trainer.output


def test_another_base_model_is_refused_with_the_fix_and_the_trainer_goes_on(pair: Pair) -> None:
    trainer = pair.trainer()
    stranger = pair.producer("stranger", base_model_digest="a" * 64)
    stranger.join(60)
    assert stranger.rejected is not None
    [problem] = stranger.rejected.problems
    assert problem.startswith("the producer serves another base model (aaaaaaaaaaaa) than the trainer trains (")
    assert problem.endswith("): give both the same model.path and model.revision")
    trainer.wait_for("WARNING refused producer stranger: the producer serves another base model")

    second = pair.trainer()  # while the first one waits
    assert second.end() == 73
    assert f"another rl-trainer is at work in {pair.folder}/run; stop it, or choose another run_dir" in second.output
    third = pair.trainer("--set", f"run_dir={pair.folder}/elsewhere")  # on the same endpoint
    assert third.end() == 73
    assert "is in use by another process. Stop that trainer, or give this run an endpoint of its own" in third.output

    pair.producer("fitting")
    assert trainer.end() == 0
    assert "rl-trainer: finished at step 2 of 2" in trainer.output


def test_rewards_that_always_fail_end_the_run_with_the_last_reason(pair: Pair) -> None:
    def failing(lease: Lease, version: int) -> Nack:
        return Nack(lease.lease_id, "reward_failed", "reward: KeyError: 'answr'")

    trainer = pair.trainer()
    producer = pair.producer(answer=failing)
    assert trainer.end() == 66
    assert (
        "rl-trainer: error: 64 of the last 64 prompts were given up, more than "
        "pipeline.max_failed_share=0.5 allows. The last one: reward_failed: reward: KeyError: 'answr'"
    ) in trainer.output
    assert "p could not answer a prompt: reward_failed: reward: KeyError: 'answr'" in trainer.output
    producer.join(20)
    assert producer.farewell == "stopping"
