"""A row goes only when no checkpoint needs it; of the others the newest stay, and the disk gets its room back."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from replay.journal import retention
from replay.journal.recovery import recover
from replay.journal.retention import Retention
from replay.journal.schema import DeadLetter, MicroBatchPlan
from replay.journal.writer import Journal
from replay.rerolls import Grade
from replay.staleness import StalenessBudget
from tests.unit.replay.builders import claim, entry, lease_ids

YEAR_S = 365 * 86_400.0


def pruned(
    journal: Journal,
    step: int,
    seq: int,
    *,
    keep_bytes: int = 0,
    keep_age_s: float = YEAR_S,
    replayable: Iterable[str] = (),
) -> tuple[int, list[int]]:
    """How many rows went, and the prompts of those that stayed."""
    count = Retention(journal).prune(
        oldest_step=step,
        oldest_seq=seq,
        replayable=frozenset(replayable),
        keep_bytes=keep_bytes,
        keep_age_s=keep_age_s,
    )
    bodies = journal.query("SELECT prompt_id FROM groups JOIN bodies USING(seq) ORDER BY seq")
    assert journal.query("SELECT prompt_id FROM groups ORDER BY seq") == bodies
    assert journal.query("SELECT count(*) FROM bodies") == [(len(bodies),)]
    return count, [prompt_id for (prompt_id,) in bodies]


def backdate(journal: Journal, seconds: float, *prompt_ids: int) -> None:
    for lease_id in lease_ids(*prompt_ids):
        journal.query("UPDATE groups SET accepted_at = accepted_at - ? WHERE lease_id = ?", (seconds, lease_id))


@pytest.fixture
def history(journal: Journal) -> Journal:
    """Rows 1 to 8, of prompts 0 to 7; every frame has 100 bytes."""
    outcomes = ["accepted", "accepted", "no_signal", "stale", "accepted", "accepted", "accepted", "no_signal"]
    journal.append([entry(i, outcome=outcome, frame=b"%0100d" % i) for i, outcome in enumerate(outcomes)])
    claim(journal, 1, 1, 0)
    claim(journal, 2, 3, 1)
    journal.drop(lease_ids(4), "stale")
    journal.drop(lease_ids(5), "configuration")
    return journal


@pytest.mark.parametrize(
    ("step", "seq", "stay"),
    [
        (0, 0, [0, 1, 2, 3, 4, 5, 6, 7]),  # the beginning is a checkpoint that knows nothing
        (0, 8, [0, 1, 6]),  # answered, and none was trained
        (1, 8, [1, 6]),
        (2, 8, [1, 6]),  # prompt 1 is trained by halves
        (3, 8, [6]),  # ready
        (9, 8, [6]),
        (3, 4, [4, 5, 6, 7]),  # that checkpoint has not heard of rows 5 to 8
        (1, 4, [1, 4, 5, 6, 7]),
    ],
)
def test_what_a_checkpoint_needs_stays_and_the_rest_goes(
    history: Journal, step: int, seq: int, stay: list[int]
) -> None:
    assert pruned(history, step, seq) == (8 - len(stay), stay)
    assert pruned(history, step, seq) == (0, stay)
    assert history.last_seq == 8


@pytest.mark.parametrize(
    ("step", "seq", "stay"),
    [
        (0, 0, [0, 1, 2, 3, 4]),
        (1, 8, [1, 2, 3, 4]),  # step 2, of prompt 1, began with v1
        (3, 8, [3, 4]),  # step 4 will begin with v3
        (9, 8, [4]),
    ],
)
def test_policies_stay_that_a_kept_step_began_with_or_made(
    history: Journal, step: int, seq: int, stay: list[int]
) -> None:
    for version in range(5):
        history.note_policy(version, version, "0" * 64)
    pruned(history, step, seq)
    assert history.query("SELECT version FROM policies ORDER BY version") == [(version,) for version in stay]
    assert history.newest_version == 4


@pytest.mark.parametrize(
    ("step", "keep_bytes", "kept"),
    [(0, 0, [1, 2, 3, 4]), (1, 0, [2, 3, 4]), (4, 0, [4]), (4, 10**6, [1, 2, 3, 4])],
)
def test_cuts_stay_of_steps_that_can_be_taken_again_and_one_to_go_on_with(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, step: int, keep_bytes: int, kept: list[int]
) -> None:
    monkeypatch.setattr(retention, "_ROWS_PER_TRANSACTION", 2)
    journal.append([entry(i) for i in range(4)])
    for number in range(4):
        claim(journal, number + 1, number + 1, number)
        journal.end_step(number + 1, MicroBatchPlan(number + 1, 64, None, b"advantages"))
    pruned(journal, step, 4, keep_bytes=keep_bytes)
    assert [found for (found,) in journal.query("SELECT step FROM plans ORDER BY step")] == kept
    of_groups = [number for number in kept if number > step or keep_bytes]
    assert [found for (found,) in journal.query("SELECT step FROM advantages ORDER BY step")] == of_groups


def test_the_policy_that_a_kept_replay_began_with_stays(journal: Journal) -> None:
    journal.append([entry(0), entry(1)])
    for version in range(5):
        journal.note_policy(version, version, "0" * 64)
    claim(journal, 1, 1, 0)
    claim(journal, 3, 3, 1, again=(0,))
    pruned(journal, 4, 2, replayable=lease_ids(0))
    assert journal.query("SELECT version FROM policies ORDER BY version") == [(0,), (1,), (2,), (3,), (4,)]
    pruned(journal, 4, 2)
    assert journal.query("SELECT version FROM policies ORDER BY version") == [(4,)]


@pytest.mark.parametrize(
    ("keep_bytes", "stay"),
    [
        (0, [6]),
        (99, [6]),
        (100, [6, 7]),
        (199, [6, 7]),
        (300, [4, 5, 6, 7]),
        (699, [1, 2, 3, 4, 5, 6, 7]),
        (700, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_of_what_nobody_needs_the_newest_stay_up_to_so_many_bytes(
    history: Journal, keep_bytes: int, stay: list[int]
) -> None:
    assert pruned(history, 3, 8, keep_bytes=keep_bytes) == (8 - len(stay), stay)


def test_what_nobody_needs_goes_after_so_long_and_what_somebody_needs_stays(history: Journal) -> None:
    backdate(history, 1000.0, 0, 1, 2, 3)
    assert pruned(history, 1, 8, keep_bytes=10**6, keep_age_s=1010.0) == (0, list(range(8)))
    assert pruned(history, 1, 8, keep_bytes=10**6, keep_age_s=990.0) == (3, [1, 4, 5, 6, 7])


def test_a_quarantined_group_stays_until_no_checkpoint_would_send_its_prompt_out_again(journal: Journal) -> None:
    journal.append([entry(0), entry(1), entry(2)])
    claim(journal, 2, 3, 0)
    journal.drop(lease_ids(0), "quarantined")
    assert pruned(journal, 1, 3) == (0, [0, 1, 2])
    budget = StalenessBudget(1, 9, num_iterations=2)
    assert recover(journal, 1, 3, budget, smaller=False, comparable=True).prompts == [
        ((0, 0, 0), "settled", "mixed", 0, False),
        ((0, 1, 0), "held", "mixed", 0, False),
        ((0, 2, 0), "held", "mixed", 0, False),
    ]
    assert pruned(journal, 2, 3) == (0, [0, 1, 2])
    assert pruned(journal, 3, 3) == (1, [1, 2])


def test_of_dead_letters_the_newest_stay(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_MAX_DEAD_LETTERS", 2)
    for prompt_id in range(5):
        journal.add_dead_letter(DeadLetter(0, prompt_id, 0, 1, "data", "bad_prompt", ""))
    pruned(journal, 0, 0)
    assert journal.query("SELECT prompt_id FROM dead_letters ORDER BY id") == [(3,), (4,)]


def test_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(Journal(path)) as journal:
        journal.append([entry(i, outcome="no_signal", frame=b"x" * 10_000) for i in range(200)])
    before = path.stat().st_size
    with contextlib.closing(Journal(path)) as journal:
        assert pruned(journal, 0, 200, keep_bytes=100_000) == (190, list(range(190, 200)))
        assert journal.query("PRAGMA freelist_count") == [(0,)]
    assert before > 2_000_000
    assert path.stat().st_size < 200_000


def test_an_acknowledgement_does_not_wait_for_the_end_of_a_long_deletion(journal: Journal) -> None:
    """The lock is free between two transactions of 256 rows."""
    journal.append([entry(i, outcome="no_signal") for i in range(600)])
    seen = []
    real = journal.transaction

    @contextlib.contextmanager
    def watched():
        with real() as db:
            yield db
        seen.append(journal.query("SELECT count(*) FROM groups")[0][0])

    journal.transaction = watched  # type: ignore[method-assign]
    assert pruned(journal, 0, 600) == (600, [])
    assert seen[:3] == [600 - 256, 600 - 512, 0]


def test_what_may_be_replayed_after_a_resume_stays_and_uses_go_with_their_group(journal: Journal) -> None:
    journal.append([entry(i) for i in range(5)])
    claim(journal, 1, 1, 0, 1)
    claim(journal, 2, 2, 2, again=(0, 1))
    claim(journal, 3, 3, 3, again=(0,))
    assert pruned(journal, 3, 5, replayable=lease_ids(1, 3)) == (2, [1, 3, 4])
    assert journal.query("SELECT step, lease_id FROM replays ORDER BY step, position") == [(2, lease_ids(1)[0])]
    assert pruned(journal, 3, 5) == (2, [4])
    assert journal.query("SELECT * FROM replays") == []


def test_a_verdict_that_a_checkpoint_has_not_heard_of_stays(journal: Journal) -> None:
    journal.append([entry(i, outcome="no_signal", grade=Grade("failed", 2, 0), missing=b"why") for i in range(2)])
    assert pruned(journal, 9, 1) == (1, [1])
    assert journal.query("SELECT seq FROM missing_rewards") == [(2,)]


def test_one_that_goes_on_keeps_as_much_as_one_that_begins_anew(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has counted before, and what is settled, deleted or replayed since, adds up."""
    monkeypatch.setattr(retention, "_ROWS_PER_COUNT", 4)
    one = Retention(journal)
    for step in range(1, 30):
        first = journal.last_seq
        outcomes = ["accepted", "no_signal", "stale", "accepted", "no_signal"]
        journal.append([entry(first + i, outcome=outcome, frame=b"%0100d" % i) for i, outcome in enumerate(outcomes)])
        claim(journal, step, step, first, first + 3)
        keep = 100 * (17 + step % 3)
        settled_seq = max(0, first - 5)
        one.prune(
            oldest_step=step - 1,
            oldest_seq=settled_seq,
            replayable={lease_ids(first)[0], lease_ids(0)[0]},
            keep_bytes=keep,
            keep_age_s=YEAR_S,
        )
        assert pruned(journal, step - 1, settled_seq, keep_bytes=keep, replayable=lease_ids(first, 0))[0] == 0
        kept = journal.query("SELECT count(*) FROM groups WHERE seq <= ? AND seq > 1", (settled_seq,))[0][0]
        assert kept == min(max(0, settled_seq - 1), keep // 100)


@pytest.mark.long
def test_what_a_checkpoint_costs_does_not_grow_with_what_is_kept(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In instructions of SQLite's machine, which do not depend on this one."""
    monkeypatch.setattr(retention, "_ROWS_PER_COUNT", 64)
    one, instructions = Retention(journal), Counter[int]()

    def prune() -> int:
        return one.prune(
            oldest_step=9,
            oldest_seq=journal.last_seq - 10,
            replayable=frozenset(),
            keep_bytes=10**9,
            keep_age_s=YEAR_S,
        )

    for num_rows in (640, 6400):
        journal.append([entry(i, outcome="no_signal") for i in range(journal.last_seq, num_rows)])
        prune()
        journal.append([entry(num_rows + i, outcome="no_signal") for i in range(64)])
        journal._db.set_progress_handler(lambda size=num_rows: bool(instructions.update([size])), 1)  # type: ignore[misc]
        assert prune() == 0
        journal._db.set_progress_handler(None)
    assert 0 < instructions[6400] < 1.5 * instructions[640]
