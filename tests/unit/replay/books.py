"""What the tests of the ledger do again and again."""

from replay.lease_ids import Key, LeaseId
from replay.prompt_ledger import PromptLedger
from replay.prompt_table import Held, LeaseRecord, PromptTask

FAR = 1e9
HELD = Held("mixed", 0)


def lease(book: PromptLedger, producer: str = "p", *, now: float = 0.0, deadline: float = FAR) -> LeaseRecord:
    record = book.lease(producer, version=0, policy_floor=0, now=now, deadline=deadline)
    assert record is not None
    return record


def prompts_of(book: PromptLedger, count: int, now: float = 0.0) -> list[int]:
    return [lease(book, now=now).task.key.prompt_id for _ in range(count)]


def find(book: PromptLedger, lease_id: str) -> Key | None:
    return book.find(LeaseId.parse(lease_id))


def adopt(book: PromptLedger, lease_id: str, producer: str, *, deadline: float) -> bool:
    return book.adopt(LeaseId.parse(lease_id), producer, deadline=deadline)


def hold(book: PromptLedger, lease_id: str) -> PromptTask[Key]:
    return book.mark_answered(LeaseId.parse(lease_id), HELD)


def recall(book: PromptLedger, key: tuple[int, int, int], *, is_new: bool) -> bool:
    return book.restore_prompt(Key(*key), HELD, is_new=is_new)


def answer(book: PromptLedger, lease_id: str) -> PromptTask[Key] | None:
    """A group arrived; the first one for its prompt is held."""
    return None if find(book, lease_id) is None else hold(book, lease_id)


def expire(book: PromptLedger, now: float) -> list[LeaseRecord]:
    overdue = book.leases.overdue(now)
    for record in overdue:
        book.leases.fail(record.lease_id, "expired", now)
    return overdue
