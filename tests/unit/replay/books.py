"""What the tests of the ledger do again and again."""

from replay.prompts.ledger import LeaseRecord, PromptLedger, WorkItem

FAR = 1e9


def lease(book: PromptLedger, producer: str = "p", *, now: float = 0.0, deadline: float = FAR) -> LeaseRecord:
    return book.lease(producer, version=0, policy_floor=0, now=now, deadline=deadline)


def prompts_of(book: PromptLedger, count: int, now: float = 0.0) -> list[int]:
    return [lease(book, now=now).item.prompt_id for _ in range(count)]


def answer(book: PromptLedger, lease_id: str) -> WorkItem | None:
    """A group arrived; the first one for its prompt is held."""
    return None if book.find(lease_id) is None else book.hold(lease_id)


def expire(book: PromptLedger, now: float) -> list[LeaseRecord]:
    overdue = book.overdue(now)
    for record in overdue:
        book.fail(record.lease_id, "expired", now)
    return overdue
