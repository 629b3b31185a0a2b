"""Held-out prompts scored by the real pair while it trains, and what a run does with the scores."""

import inspect
import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from consumer.evaluate.kept_answers import KeptAnswer, kept_versions, read_answers
from protocol.wire.codec import decode
from protocol.wire.messages import Group, Lease
from replay.sources import Sources
from slipstream.run_reader import EVALUATIONS, STEPS, RunReader
from tests.integration.models import reference_distributions
from tests.integration.pair import Daemon, end_well, run_pair
from tests.integration.runs import Run
from tests.integration.test_pair import write_run
from tests.scripted import made_up_group

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def worth(completions, **_):
    return [sum((i + 1) * ord(c) for i, c in enumerate(text)) % 97 / 97 for text in completions]


WORTH = inspect.getsource(worth)
HELD_OUT = [f"{i}+{i + 3}=" for i in range(40)]


def halves(path: Path) -> dict[str, Any]:
    """A dataset whose rows are those of two sources."""
    parts = {"low": "train[:20]", "high": "train[20:]"}
    return {"path": None, "sources": [{"name": name, "path": str(path), "split": part} for name, part in parts.items()]}


def worth_of_greedy(model_folder: Path, adapter: Path | None, answers: list[KeptAnswer]) -> list[float]:
    """Score the answers to the held-out prompts, whose every token is one that transformers finds the likeliest, but for what
    another order of additions may decide."""
    tokenizer, texts = AutoTokenizer.from_pretrained(model_folder), []
    for asked, answer in zip(HELD_OUT, answers, strict=True):
        group = decode(answer.frame, Group)
        prompt, ids = (np.frombuffer(each, "<i4").tolist() for each in (group.prompt_ids, group.completion_ids))
        assert prompt == tokenizer.encode(asked)
        assert len(ids) == 8 or ids[-1] == tokenizer.eos_token_id
        whole = reference_distributions(model_folder, adapter, prompt, ids)
        assert (whole.max(1).values - whole.gather(1, torch.tensor(ids)[:, None])[:, 0]).max() < 1e-3
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return worth(texts)


def pending(folder: Path) -> list[int]:
    """The versions that wait for their result, or are being evaluated."""
    return sorted(int(file.name.split("-")[1]) for file in (folder / "run" / "evaluation").glob("*.adapter"))


def wait_until(condition: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_score_is_that_of_the_version_it_names_whoever_is_killed(short_dir: Path, daemons: list[Daemon]) -> None:
    (short_dir / "held-out.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in HELD_OUT))
    config = str(
        write_run(
            short_dir,
            "qwen2",
            [{"prompt": f"{i}+1="} for i in range(40)],
            WORTH,
            dataset=halves(short_dir / "data.jsonl"),
            evaluation={"dataset": halves(short_dir / "held-out.jsonl"), "every_versions": 3},
            trainer={"max_steps": 10, "learning_rate": 3e-3, "save_steps": 3, "save_total_limit": 100},
        )
    )

    def start(module: str, log: str, *arguments: str) -> Daemon:
        daemons.append(Daemon(module, short_dir / log, "--config", config, *arguments))
        return daemons[-1]

    producer, trainer = start("producer.app.cli", "producer-1.log"), start("consumer.app.cli", "trainer-1.log")
    trainer.wait_for(r"evaluation of v0 \(step 0\)", beside=producer)
    wait_until(lambda: pending(short_dir))
    producer.kill()
    first = pending(short_dir)
    producer = start("producer.app.cli", "producer-2.log")
    wait_until(lambda: pending(short_dir) not in (first, []))
    trainer.kill()
    trainer = start("consumer.app.cli", "trainer-2.log", "--resume")
    end_well(trainer, producer)

    run_dir = short_dir / "run"
    lines = RunReader(run_dir).lines(EVALUATIONS)
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions)), "each once"
    assert {0, *first[:1], 10} <= set(versions) <= {0, 3, 6, 9, 10}
    answers = {version: read_answers(file) for version, file in kept_versions(run_dir).items()}
    for line in lines:
        folder = run_dir / "checkpoints" / f"checkpoint-{line['version']}"
        adapter = None if line["version"] == 0 else run_dir / "adapter" if line["version"] == 10 else folder
        expected = worth_of_greedy(short_dir / "model", adapter, answers[line["version"]])
        assert line["score"] == pytest.approx(np.mean(expected), abs=1e-6), line["version"]
        of_sources = [line["sources"][name]["score"] for name in ("low", "high")]
        assert of_sources == pytest.approx([np.mean(expected[:20]), np.mean(expected[20:])], abs=1e-6)
        assert line["mean_of_sources"] == pytest.approx(line["score"]), "of as many prompts each"
        assert (line["num_prompts"], line["num_scored"], line["step"]) == (40, 40, line["version"])
    assert len({line["score"] for line in lines}) >= 3, "training moved the completions"
    assert {version: np.mean([one.score for one in found]) for version, found in answers.items()} == pytest.approx(
        {line["version"]: line["score"] for line in lines}
    )

    best = max(lines, key=lambda line: line["score"])
    kept = run_dir / "checkpoints" / "best"
    assert json.loads((kept / "evaluation.json").read_text())["version"] == best["version"]
    expected = worth_of_greedy(short_dir / "model", kept, answers[best["version"]])
    assert best["score"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert json.loads((run_dir / "trainer.json").read_text())["best"]["version"] == best["version"]
    assert list((run_dir / "evaluation").iterdir()) == []
    check_sources(run_dir)


def check_sources(run_dir: Path) -> None:
    """Compare the counts and shares of the steps, over a crash and a resumption, with the journal."""
    with closing(RunReader(run_dir).journal()) as journal:
        sources, groups = Sources.of_facts(journal.facts()), list(journal.rows())
    assert sources == Sources(("low", "high"), (0, 20))
    steps = RunReader(run_dir).lines(STEPS)
    for name in sources.names:
        trained = Counter(
            row.step for row in groups if row.state == "trained" and sources.name_of(row.prompt_id) == name
        )
        assert [line[f"sources/{name}/batch_share"] for line in steps] == [trained[line["step"]] / 4 for line in steps]
        assert steps[-1]["counts"][f"sources/{name}/trained"] == trained.total()
        assert any(line.get(f"sources/{name}/generation_s", 0.0) > 0 for line in steps)
    for outcome in ("leased", "accepted", "no_signal", "stale", "trained"):
        of_both = [steps[-1]["counts"].get(f"sources/{name}/{outcome}", 0) for name in sources.names]
        assert sum(of_both) == steps[-1]["counts"].get(outcome, 0), outcome


def test_merged_weights_stay_until_the_last_prompt_of_their_evaluation_is_answered(
    short_dir: Path, daemons: list[Daemon]
) -> None:
    """Training goes on meanwhile, and an engine of one version has newer ones waiting."""
    prompts = [f"{i}+{j}=" for i in range(20) for j in range(10)]
    (short_dir / "held-out.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = write_run(
        short_dir,
        "qwen2",
        [{"prompt": f"{i}+1="} for i in range(40)],
        WORTH,
        evaluation={"dataset": {"path": str(short_dir / "held-out.jsonl")}, "every_versions": 4, "hold_swap_s": 600},
        swap={"mode": "merged"},
        trainer={"max_steps": 8, "learning_rate": 1e-3},
    )
    run_pair(short_dir, str(config), daemons)
    lines = RunReader(short_dir / "run").lines(EVALUATIONS)
    assert [(line["version"], line["num_scored"]) for line in lines] == [
        (version, len(prompts)) for version in (0, 4, 8)
    ]


class FallingAfterThree:
    """The third version that is evaluated is the best, whichever that is: a busy machine may pass over some."""

    def __init__(self) -> None:
        self._versions: list[int] = []

    def __call__(self, lease: Lease, policy_version: int) -> Group:
        if not lease.evaluates:
            return made_up_group(lease, policy_version)
        if policy_version not in self._versions:
            self._versions.append(policy_version)
        place = self._versions.index(policy_version)
        return made_up_group(lease, policy_version, rewards=[[0.25, 0.5, 0.75][place] if place < 3 else 0.5])


def test_a_run_ends_when_nothing_improves_and_the_best_adapter_outlives_the_checkpoints(
    start: Any, tmp_path: Path
) -> None:
    run: Run = start(
        evaluation={
            "dataset": {"path": str(tmp_path / "train.jsonl")},
            "every_versions": 1,
            "max_prompts": 3,
            "patience": 2,
        },
        trainer={"max_steps": 200, "save_steps": 1, "save_total_limit": 1},
    )
    trainer = run.trainer()
    run.producer(answer=FallingAfterThree(), evaluates=True)
    assert trainer.end(90) == 0, trainer.output[-3000:]
    assert "2 evaluations in a row were no improvement on mean reward 0.75 (evaluation.patience)" in trainer.output
    run_dir = Path(run.config.run_dir)
    summary = json.loads((run_dir / "trainer.json").read_text())
    assert summary["finished"] is True
    assert summary["stopped_early"].startswith("2 evaluations in a row")
    assert summary["steps"] < 200
    scores = [line["score"] for line in RunReader(run_dir).lines(EVALUATIONS)]
    assert max(scores) == 0.75
    folders = sorted(folder.name for folder in run.config.checkpoints_dir.glob("[!.]*") if folder.is_dir())
    assert folders == ["best", f"checkpoint-{summary['steps']}"]
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()

    again = run.trainer("--resume")
    assert again.end(60) == 0
    assert run.steps[-1]["step"] == summary["steps"], "a finished run is not trained further"
