"""A run with three environments and single turns: both daemons are real, vLLM is scripted, one environment hangs, and groups of
another branch off a trunk."""

import json
import math
import signal
from contextlib import closing
from pathlib import Path

import pytest

from replay.journal.reader import JournalReader
from replay.watches import Skip, skipped_before
from slipstream.cli import run as slipstream

from .pair import Daemon, end_well
from .test_pair import read_steps, status, write_run

pytestmark = pytest.mark.integration

CODE = """
import itertools, time

def count(completions, environment, **_):
    assert set(environment) == {"single_turn"}
    return [float(k) for k in range(len(completions))]

class Dice:
    rolls = itertools.count()

    def reset(self, environment, **_):
        assert environment == "dice"

    def get_reward(self):
        return float(next(self.rolls) % 2)

class Talks:
    rolls = itertools.count()

    def reset(self, **_):
        self.num_said = 0

    def reply(self, text):
        self.num_said += 1
        return f"more {self.num_said}"

    def get_reward(self):
        return 10.0 * self.num_said + float(next(self.rolls) % 2)

class Hangs:
    def reset(self, **_):
        time.sleep(600)

    def get_reward(self):
        return 1.0
"""


FAILS = """
import itertools

class Dice:
    rolls = itertools.count()

    def reset(self, **_):
        pass

    def get_reward(self):
        return float(next(self.rolls) % 2)

class Fails(Dice):
    def reset(self, **_):
        raise RuntimeError('broken')
"""


def row(name: str | None, number: int) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": f"{number}+1="}], "environment": name}


def test_each_row_is_played_by_its_environment_and_one_that_hangs_stops_no_other(
    short_dir: Path, daemons: list[Daemon]
) -> None:
    rows = [row(name, number) for number in range(10) for name in ("dice", "talks", "hangs", None)]
    place = f"{short_dir}/rewards.py"
    limits = {"reward_weight": 0.5, "max_turns": 1, "max_concurrent": 1, "call_timeout_s": 1.0}
    config = write_run(
        short_dir, "qwen2", rows, CODE, sampling={"num_generations": 2, "max_completion_length": 64},
        pipeline={"groups_per_step": 2}, trainer={"max_steps": 4, "save_steps": 4},
        rewards={"functions": [{"function": f"{place}:count", "environments": ["single_turn"]}]},
        environments=[
            {"name": "dice", "factory": f"{place}:Dice"} | limits,
            {"name": "talks", "factory": f"{place}:Talks", "branch_after_turns": 1} | limits | {"max_turns": 2},
            {"name": "hangs", "factory": f"{place}:Hangs"} | limits,
        ],
    )  # fmt: skip
    (short_dir / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    )
    for module, name in (("tests.integration.spans_producer", "producer"), ("consumer.app.cli", "trainer")):
        daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config)))
    end_well(daemons[1], daemons[0])

    assert len(read_steps(short_dir)) == 4
    trained = short_dir / "trained.jsonl"
    arguments = ["journal", "--run", str(short_dir / "run"), "export", "--state", "trained", "--to", str(trained)]
    assert slipstream(arguments) == 0
    found: dict[str, list[list[float]]] = {"single_turn": [], "dice": [], "talks": [], "hangs": []}
    for group in map(json.loads, trained.read_text().splitlines()):
        assert group["reward_names"] == ["count", "dice", "talks", "hangs"]
        rewards = [[math.nan if each is None else each for each in row] for row in group["rewards"]]
        scored = [name for name, worth in zip(found, rewards[0], strict=True) if worth == worth]
        assert len(scored) == 1, "rows of others are missing"
        found[scored[0]].append([row[list(found).index(scored[0])] for row in rewards])
        has_trunk = group["prompt_ids"][5:9] == [5, 6, 7, 8]
        assert (has_trunk, len(group["prompt_ids"]) > 9) == (scored == ["talks"],) * 2
        assert group["completion_ids"] == [[5, 6, 7, 8]] * 2
    assert found["hangs"] == []
    assert {tuple(group) for group in found["single_turn"]} == {(0.0, 1.0)}
    assert {tuple(sorted(group)) for group in found["dice"]} == {(0.0, 1.0)}
    assert {tuple(sorted(group)) for group in found["talks"]} == {(20.0, 21.0)}, "of two replies, one to the trunk"


def test_the_run_goes_on_without_one_that_always_fails_and_tries_it_again_when_resumed(
    short_dir: Path, daemons: list[Daemon]
) -> None:
    config = write_run(
        short_dir, "qwen2", [row(name, number) for number in range(100) for name in ("dice", "fails")], FAILS,
        sampling={"num_generations": 2}, rewards={"functions": []},
        pipeline={"groups_per_step": 2, "max_data_attempts": 1, "max_failed_share": 0.1},
        trainer={"max_steps": 100_000, "save_steps": 100_000}, replay={"keep_all": True},
        environments=[
            {"name": name, "factory": f"{short_dir}/rewards.py:{name.title()}", "reward_weight": 1.0, "max_turns": 1}
            | ({"on_failure": "skip"} if name == "fails" else {})
            for name in ("dice", "fails")
        ],
        evaluation={"dataset": {"path": str(short_dir / "data.jsonl")}, "every_versions": 1, "max_prompts": 4},
    )  # fmt: skip
    (short_dir / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )

    def start(name: str, *arguments: str) -> Daemon:
        module = {"producer": "tests.integration.spans_producer", "trainer": "consumer.app.cli"}[name]
        daemons.append(Daemon(module, short_dir / f"{name}.log", "--config", str(config), *arguments))
        return daemons[-1]

    producer, trainer = start("producer"), start("trainer")
    said = trainer.wait_for(r"environments\.fails: (\d+) of its last (\d+) prompts were given up.*", beside=producer)
    assert said[1] == said[2] == "16"
    assert [word for word in ("environment_failed", "broken", "--resume") if word not in said[0]] == [], said[0]
    trainer.wait_for(r"evaluation of v.*without fails", beside=producer)
    shown = status(short_dir / "run")["trainer"]
    assert shown["environment_skipped"] == {"dice": 0, "fails": 1}
    assert shown["environment_groups"]["fails"]["dead_letters"] >= 16
    assert shown["environment_groups"]["dice"]["trained"] > 0
    assert "fails" not in shown["environment_reward"]
    stop(trainer, producer)
    assert trainer.output.count("environments.fails: ") == 1
    assert facts(short_dir)["fails"][0] == 16
    with closing(JournalReader(short_dir / "run" / "journal.sqlite")) as reader:
        letters = list(reader.dead_letters())
    assert {letter.reason for letter in letters} == {"environment_failed"}
    assert len(letters) < 40, "what was in flight may fail, too"
    assert "without" in json.loads((short_dir / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    steps = len(read_steps(short_dir))
    options = ("--from-journal", str(short_dir / "run"), "--set", f"run_dir={short_dir}/again")
    daemons.append(Daemon("consumer.app.cli", short_dir / "again.log", "--config", str(config), *options))
    assert daemons[-1].end(240) == 0, daemons[-1].last_words
    weights = f"checkpoints/checkpoint-{steps}/adapter_model.safetensors"
    assert (short_dir / "again" / weights).read_bytes() == (short_dir / "run" / weights).read_bytes()

    (short_dir / "rewards.py").write_text(FAILS.replace("raise RuntimeError('broken')", "pass"))
    producer, trainer = start("producer"), start("trainer", "--resume")
    trainer.wait_for(r"environments\.fails: it was skipped", beside=producer)
    trainer.wait_for(rf"step {steps + 8}/", beside=producer)
    assert facts(short_dir) == {}, "until it fails again"
    assert status(short_dir / "run")["trainer"]["environment_skipped"] == {"dice": 0, "fails": 0}
    stop(trainer, producer)


def facts(folder: Path) -> dict[str, Skip]:
    with closing(JournalReader(folder / "run" / "journal.sqlite")) as reader:
        return skipped_before(reader.facts())


def stop(trainer: Daemon, producer: Daemon) -> None:
    """Both as by Ctrl-C, the trainer first."""
    for daemon in (trainer, producer):
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.end() in (0, 130), daemon.last_words
