"""A lease is begun once and answered once; its answer stays until the trainer has it, and its bytes are counted."""

import pytest

from producer.link.outbox import Outbox
from protocol.wire.messages import Group, Nack


def group(lease_id: str, size: int = 0) -> Group:
    return Group(lease_id, 0, bytes(4), bytes(8), bytes(size), bytes(size), bytes(8), bytes(2), 0.0, 0.0)


@pytest.fixture
def outbox() -> Outbox:
    """With 102 bytes it is not full yet."""
    return Outbox(102)


def finished(outbox: Outbox, *answers: Group | Nack) -> None:
    for answer in answers:
        assert outbox.begin(answer.lease_id)
        assert outbox.finish(answer)


def test_it_is_full_above_its_bytes_and_not_at_them(outbox):
    finished(outbox, group("large", 40))
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (1, 102, False)
    finished(outbox, group("small", 20))
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (2, 164, True)
    outbox.replace(Nack("small", "generation_failed", "too large"))
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (1, 102, False)
    assert outbox.held() == ["large", "small"]
    assert outbox.settle("large")
    assert (outbox.num_groups, outbox.num_bytes, outbox.all_settled) == (0, 0, False)


def test_a_lease_is_begun_once_and_answered_once(outbox):
    assert not outbox.finish(group("a")), "nobody has begun it"
    for lease_id in "cba":
        assert outbox.begin(lease_id)
        assert not outbox.begin(lease_id)
    assert outbox.finish(group("b"))
    assert not outbox.finish(group("b"))
    assert not outbox.begin("b"), "its answer is kept"
    assert (outbox.held(), outbox.num_held) == (["a", "c", "b"], 3)
    assert [outbox.abandon(lease_id) for lease_id in "abd"] == [True, False, False]
    assert [outbox.settle(lease_id) for lease_id in "cbb"] == [False, True, False]
    assert (outbox.held(), outbox.all_settled) == (["c"], True)
    assert outbox.begin("b")


def test_a_group_comes_due_again_after_fifteen_seconds_or_with_the_next_connection_and_a_refusal_never(outbox):
    sent, refused = group("sent"), Nack("refused", "returned")
    finished(outbox, sent, refused)
    assert outbox.due(100.0) == [sent, refused]
    for answer in (sent, refused):
        outbox.note_sent(answer, 100.0)
    assert (outbox.due(114.9), outbox.due(115.0), outbox.held()) == ([], [sent], ["sent"])
    outbox.forget_sends()
    assert outbox.due(100.1) == [sent]


def test_a_group_that_is_not_settled_comes_due_more_and_more_rarely_and_never_stops(outbox):
    sent, now, pauses = group("sent"), 0.0, []
    finished(outbox, sent)
    for _ in range(8):
        outbox.note_sent(sent, now)
        pause = next(pause for pause in range(1, 1000) if outbox.due(now + pause))
        pauses.append(pause)
        now += pause
    assert pauses == [15, 30, 60, 120, 240, 240, 240, 240]
    outbox.forget_sends()
    outbox.note_sent(sent, now)
    assert (outbox.due(now + 14.9), outbox.due(now + 15.0)) == ([], [sent])


def test_another_run_voids_what_is_worked_on_and_what_is_kept(outbox):
    finished(outbox, group("a"), Nack("b", "returned"))
    outbox.begin("c")
    assert (outbox.void(), outbox.held(), outbox.num_held, outbox.all_settled) == (3, [], 0, True)
