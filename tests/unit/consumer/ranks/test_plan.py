"""What rank 0 tells the others: the checkpoint that a run goes on from, piece by piece."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer.app import follower
from consumer.ranks import exchange as leading
from consumer.ranks.exchange import Begin, Gather, Piece, PlanError, decode, encode
from replay.batch_selection import TrainingBatch

from .thread_ranks import ThreadRanks, on_ranks

FILES = {"adapter.safetensors": b"0123456789", "empty": b"", "optimizer.pt": b"abc"}


def test_every_rank_gets_the_checkpoint_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "PIECE_BYTES", 4)
    source = tmp_path / "checkpoint-7"
    source.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)

    def work(ranks: ThreadRanks) -> None:
        if ranks.rank == 0:
            leading.begin(ranks, 40, 12, 7, source)
            return
        folder = tmp_path / f"rank-{ranks.rank}"
        folder.mkdir()
        begun = ranks.share(None)
        assert begun == Begin(40, 12, 7, {name: len(data) for name, data in FILES.items()})
        follower.receive_files(ranks, begun.files, folder)

    on_ranks(3, work)
    for rank in (1, 2):
        assert {file.name: file.read_bytes() for file in (tmp_path / f"rank-{rank}").iterdir()} == FILES


def test_a_run_that_begins_anew_has_no_files() -> None:
    said = on_ranks(2, lambda ranks: ranks.share(None) if ranks.rank else leading.begin(ranks, 40, 12, 0, None))
    assert said[1] == Begin(40, 12, 0, {})


def test_another_plan_in_the_middle_of_a_file_is_refused(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> None:
        if ranks.rank == 0:
            ranks.share(Begin(1, 1, 1, {}))
        else:
            with pytest.raises(PlanError, match="rank 0 did not say all of the checkpoint's adapter"):
                follower.receive_files(ranks, {"adapter": 3}, tmp_path)

    on_ranks(2, work)


def test_a_stop_within_a_batch_leaves_no_rank_in_the_next_step() -> None:
    """Rank 0 may gather the trainer's state then, for a checkpoint."""
    batch, taken, gathered = TrainingBatch(1, 3, 3, [], 0), list[tuple[int, int]](), list[str]()
    trainer = SimpleNamespace(
        model=SimpleNamespace(state_dict=lambda: gathered.append("model")),
        optimizer=SimpleNamespace(state_dict=lambda: gathered.append("optimizer")),
    )

    def work(ranks: ThreadRanks) -> None:
        for step in leading.steps_of(batch, ranks, trainer):
            taken.append((ranks.rank, step))
            if ranks.rank == 0 and step == 2:
                break
        for plan in (Gather("model"), Gather("optimizer"), Begin(1, 1, 2, {})):
            ranks.share(plan)

    with pytest.raises(PlanError, match="left a batch"):
        on_ranks(3, work)
    assert sorted(taken) == [(rank, step) for rank in range(3) for step in (1, 2)]
    assert sorted(gathered) == ["model"] * 2 + ["optimizer"] * 2


def test_all_ranks_take_every_step_of_a_batch() -> None:
    batch = TrainingBatch(1, 2, 4, [], 0)
    assert on_ranks(2, lambda ranks: list(leading.steps_of(batch, ranks, None))) == [[3, 4], [3, 4]]


def test_what_is_no_plan_is_refused() -> None:
    assert decode(encode(Piece(b"\0\1"))) == Piece(b"\0\1")
    with pytest.raises(PlanError, match="rank 0 runs another release"):
        decode(encode(Piece(b"\0\1"))[:-1])
