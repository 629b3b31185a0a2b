"""The frozen base, or the weights that train, in parts on several ranks: real processes on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from consumer.ranks.placement import Nodes
from consumer.ranks.rendezvous import listen

from .runs import Run
from .warm import WarmProcess

pytestmark = pytest.mark.integration

WORLD = 3


def test_a_step_on_a_shared_base_is_that_of_one_process(tmp_path: Path, trained_model: Path) -> None:
    """Of 4 rows and 3 ranks, with limits that give them different numbers of micro-batches."""
    store = listen(Nodes())
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(WORLD)]
    places = [str(WORLD), str(store.port), str(tmp_path), str(trained_model)]
    ranks = [
        WarmProcess("tests.integration.sharded_trainer", [str(rank), *places], logs[rank], environment)
        for rank in range(WORLD)
    ]
    try:
        assert [rank.wait(400) for rank in ranks] == [0] * WORLD, [log.read_text()[-2000:] for log in logs]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    of_ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]
    for name, first in of_ranks[0].items():
        for number, found in enumerate(of_rank[name] for of_rank in of_ranks):
            loss, of_loss = found["loss"]
            assert of_loss == pytest.approx(loss, rel=1e-10, abs=1e-12), name
            assert found["largest"] > 1e-4
            assert found["gradient"] <= 1e-10 * found["largest"], name
            metrics, of_metrics = found["metrics"]
            assert of_metrics == (pytest.approx(metrics, rel=1e-10, abs=1e-12) if number == 0 else {}), name
            assert found["num_micro_batches"] == first["num_micro_batches"]
            assert found["numbers"] < (0.4 if "weights" in name else 0.8) * found["whole"]
    for rank in range(WORLD):
        for name, found in json.loads((tmp_path / f"continued-{rank}.json").read_text()).items():
            assert found["moved"] > 1e-6, name
            assert abs(found["norm"]) < 1e-10, name
            assert max(found["apart"], found["single"]) < 1e-10 * found["moved"], name
            assert found["resumed"] == 0, "bit for bit"
            assert found["part"] < 0.4
            assert found["sent"] == 0, "no rank is sent weights"


def test_no_pass_of_one_rank_alone(start: Callable[..., Run], tmp_path: Path) -> None:
    """Steps of which a rank has no rows, two iterations over a batch, a probe at each policy, evaluations and the early stop that
    they ask for, and all of it again from the journal."""
    run = start(
        pipeline={"groups_per_step": 1, "shard_base": "layers"},
        sampling={"num_generations": 2},
        trainer={"max_steps": 500, "num_iterations": 2, "beta": 0.1},
        swap={"probe_every": 1},
        replay={"keep_all": True},
        evaluation={
            "dataset": {"path": str(tmp_path / "train.jsonl")},
            "max_prompts": 2,
            "every_versions": 2,
            "patience": 2,
        },
    )
    run.producer(evaluates=True)
    trainer = run.trainer("--ranks", "3")
    assert trainer.end() == 0, trainer.output
    assert "the base lies on 3 ranks" in trainer.output
    last, again = run.column("step")[-1], run.folder / "again"
    assert 4 <= last < 500
    retrained = run.trainer("--ranks", "3", "--from-journal", run.config.run_dir, "--set", f"run_dir={again}")
    assert retrained.end() == 0, retrained.output
    file = f"checkpoint-{last}/adapter_model.safetensors"
    assert (again / "checkpoints" / file).read_bytes() == (run.config.checkpoints_dir / file).read_bytes()
