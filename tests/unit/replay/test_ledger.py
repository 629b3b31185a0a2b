"""Every prompt of an epoch is leased to one producer at a time and settled once; nothing is lost."""

import pytest

from protocol.errors import DatasetError, JournalError
from replay.lease_ids import LeaseId, UnknownLeaseError
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import LeaseRecord, PromptTask
from tests.unit.replay.books import FAR, adopt, answer, expire, find, hold, lease, prompts_of, recall
from tests.unit.replay.builders import ledger

# The order.


@pytest.mark.parametrize("num_prompts", [1, 2, 7, 100])
def test_every_epoch_is_a_permutation_and_another_one(num_prompts: int) -> None:
    order = prompts_of(ledger(num_prompts, seed=3, shuffle=True), 3 * num_prompts)
    epochs = [order[i * num_prompts : (i + 1) * num_prompts] for i in range(3)]
    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    if num_prompts == 100:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(100))


def test_without_shuffle_the_dataset_keeps_its_order_and_epochs_roll_over() -> None:
    book = ledger(3)
    keys = [lease(book).task.key for _ in range(7)]
    assert keys == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0)]
    assert book.order.epoch == 2
    assert book.leases.num_leases == 7


# The life of a lease.


def test_a_lease_names_its_prompt_attempt_session_producer_floor_and_deadline() -> None:
    book = ledger(2, session="ab12")
    lease(book)
    record = book.lease("gpu-0", version=4, policy_floor=4, now=0.0, deadline=60.0)
    assert record == LeaseRecord("0-1-0-1-ab12", PromptTask((0, 1, 0), attempt=1), "gpu-0", 4, 60.0)
    assert LeaseId.parse(record.lease_id) == ((0, 1, 0), 1, "ab12")
    assert lease(book).lease_id == "1-0-0-1-ab12"


def test_a_group_is_held_until_its_prompt_is_settled() -> None:
    book = ledger()
    record = lease(book)
    assert find(book, record.lease_id) == (0, 0, 0)
    item = hold(book, record.lease_id)
    assert item == record.task
    assert book.leases.num_leases == 0
    assert book.is_held((0, 0, 0))
    assert find(book, record.lease_id) is None
    assert book.state()["unsettled"] == [[0, 0, 0, 0, 1, 0, 0]]
    book.mark_done(item.key)
    assert not book.is_held((0, 0, 0))
    assert book.state()["unsettled"] == []
    assert find(book, record.lease_id) is None


def test_a_lease_given_back_goes_out_again_at_once_and_counts_no_failure() -> None:
    book = ledger(data_attempts=1, infra_attempts=1)
    record = lease(book)
    book.leases.give_back(record.lease_id)
    book.leases.give_back(record.lease_id)
    assert book.leases.num_leases == 0
    assert lease(book).task == PromptTask((0, 0, 0), attempt=2)
    assert lease(book).task.key.prompt_id == 1


# Failures and their budgets.


def test_of_the_prompts_that_are_due_the_one_that_failed_first_goes_first() -> None:
    book = ledger(10)
    slow, quick = lease(book), lease(book)
    book.leases.fail(slow.lease_id, "reward_failed", 0.0)
    book.leases.fail(quick.lease_id, "expired", 0.1)
    assert prompts_of(book, 1, now=0.5) == [1]
    book = ledger(10)
    slow, quick = lease(book), lease(book)
    book.leases.fail(slow.lease_id, "reward_failed", 0.0)
    book.leases.fail(quick.lease_id, "expired", 0.1)
    assert prompts_of(book, 2, now=1.0) == [0, 1]


@pytest.mark.parametrize("reason", ["prompt_too_long", "bad_prompt"])
def test_a_hopeless_prompt_is_given_up_at_once_for_this_epoch(reason: str) -> None:
    book = ledger(1)
    assert book.leases.fail(lease(book).lease_id, reason, 0.0) is False
    assert lease(book).task == PromptTask((1, 0, 0), attempt=1)


def test_a_group_for_a_prompt_that_was_given_up_is_not_wanted() -> None:
    book = ledger()
    record = lease(book)
    book.leases.fail(record.lease_id, "bad_prompt", 0.0)
    assert find(book, record.lease_id) is None
    assert not adopt(book, record.lease_id, "p", deadline=FAR)


def test_who_is_told_of_a_spent_budget_may_refuse_it_and_then_nothing_happened() -> None:
    book = ledger(data_attempts=2)
    book.leases.fail(lease(book).lease_id, "reward_failed", 0.0)
    record = lease(book, now=1.0)
    told: list[PromptTask] = []

    def refuse(task: PromptTask) -> None:
        told.append(task)
        raise JournalError("full")

    for _ in range(2):
        with pytest.raises(JournalError):
            book.leases.fail(record.lease_id, "reward_failed", 1.0, refuse)
    assert told == [PromptTask((0, 0, 0), attempt=2, data_failures=2)] * 2
    assert book.leases.fail(record.lease_id, "reward_failed", 1.0, told.append) is False
    assert len(told) == 3
    assert book.leases.num_leases == 0


def test_a_late_failure_makes_no_difference() -> None:
    book = ledger(data_attempts=1)
    waiting, leased_again, answered = (lease(book, deadline=1.0) for _ in range(3))
    expire(book, 1.0)
    assert book.leases.fail(waiting.lease_id, "reward_failed", 1.0) is None  # it goes out again anyway
    second = [lease(book, now=2.0) for _ in range(3)]
    assert second[0].task == PromptTask((0, 0, 0), attempt=2, infra_failures=1)
    assert book.leases.fail(leased_again.lease_id, "reward_failed", 2.0) is None
    assert book.leases.num_leases == 3
    hold(book, second[2].lease_id)
    assert book.leases.fail(answered.lease_id, "reward_failed", 2.0) is None
    assert book.leases.fail("never-heard-of", "reward_failed", 2.0) is None


# Leases of other processes.


@pytest.mark.parametrize(
    "lease_id",
    [
        "other-1", "", "0-0-1", "0-0-1-s-s", "a-0-1-s", "0--1-s", "-1-0-1-s", "0-4-0-1-s", "0-0-0-0-s", "2-0-0-1-s",
        "0-0-0-1234567890123456-s", "0-1.0-1-s",
    ],
)  # fmt: skip
def test_what_no_trainer_of_this_run_can_have_given_is_told_apart(lease_id: str) -> None:
    book = ledger(4)
    with pytest.raises(UnknownLeaseError):
        find(book, lease_id)
    with pytest.raises(UnknownLeaseError):
        adopt(book, lease_id, "p", deadline=FAR)
    book.leases.give_back(lease_id)
    assert book.leases.fail(lease_id, "bad_prompt", 0.0) is None
    assert book.state() == ledger(4).state()


def test_a_lease_of_the_process_before_is_adopted_with_its_attempt() -> None:
    book = ledger(4, session="t")
    assert adopt(book, "0-1-0-3-s", "gpu-7", deadline=9.0)
    assert book.leases.leases_of("gpu-7") == [
        LeaseRecord("0-1-0-3-s", PromptTask((0, 1, 0), attempt=3), "gpu-7", 0, 9.0)
    ]
    assert prompts_of(book, 3) == [0, 2, 3], "what the cursor passed goes out, and the adopted one does not"
    expire(book, 9.0)
    assert lease(book, now=10.0).lease_id == "0-1-0-4-t"


def test_an_adopted_lease_can_be_answered_and_can_fail() -> None:
    book = ledger(4, session="t", data_attempts=1)
    assert adopt(book, "0-0-0-1-s", "p", deadline=FAR)
    assert answer(book, "0-0-0-1-s") == PromptTask((0, 0, 0), attempt=1)
    assert adopt(book, "0-1-0-1-s", "p", deadline=FAR)
    assert book.leases.fail("0-1-0-1-s", "reward_failed", 0.0) is False
    assert book.leases.num_leases == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_of_this_epoch_and_the_next_can_be_answered_whatever_the_cursor(seed: int) -> None:
    for position in range(7):
        book = ledger(6, seed=seed, shuffle=True)
        out = set(prompts_of(book, position))
        for key in [(epoch, prompt_id, 0) for epoch in (0, 1) for prompt_id in range(6)]:
            assert find(book, f"{key[0]}-{key[1]}-0-1-t") == key
        hold(book, "1-3-0-1-t")
        assert book.order.epoch == 1
        assert book.state()["position"] >= 1
        passed = {tuple(values[:2]) for values in book.state()["unsettled"]}
        assert {(0, prompt_id) for prompt_id in range(6)} <= passed
        assert {record.task.key.prompt_id for record in book.leases.leases_of("p")} == out


def test_a_group_that_was_wanted_stays_wanted_when_another_one_moves_the_cursor() -> None:
    """Groups that arrive together are judged together, and admitted one after the other."""
    for seed in range(5):
        for other in (f"1-{prompt_id}-0-1-t" for prompt_id in range(6)):
            book = ledger(6, seed=seed, shuffle=True)
            prompts_of(book, 6)
            every = [f"{epoch}-{prompt_id}-0-1-t" for epoch in range(4) for prompt_id in range(6)]
            wanted = [lease_id for lease_id in every if finds(book, lease_id) and lease_id != other]
            hold(book, other)
            assert all(finds(book, lease_id) for lease_id in wanted)


def finds(book: PromptLedger, lease_id: str) -> bool:
    try:
        return find(book, lease_id) is not None
    except UnknownLeaseError:
        return False


def test_recall_holds_what_the_journal_knows_and_leaves_alone_what_the_checkpoint_settled() -> None:
    book = ledger(4)
    settled, open_ = lease(book), lease(book)
    hold(book, settled.lease_id)
    book.mark_done(settled.task.key)
    restored = ledger(4, session="t")
    restored.restore(book.state())
    assert recall(restored, settled.task.key, is_new=False) is False
    assert recall(restored, open_.task.key, is_new=False) is True
    assert recall(restored, open_.task.key, is_new=False) is False, "held already"
    assert recall(restored, (1, 0, 0), is_new=True) is True, "beyond the cursor"
    assert restored.is_held(open_.task.key)
    assert restored.is_held((1, 0, 0))
    assert [lease(restored).task.key for _ in range(3)] == [(0, 2, 0), (0, 3, 0), (1, 1, 0)]


# Checkpoints.


def test_restore_refuses_a_dataset_of_another_size() -> None:
    with pytest.raises(DatasetError, match="the dataset has 5 prompts now and had 4 at the checkpoint; go on with"):
        ledger(5).restore(ledger(4).state())
