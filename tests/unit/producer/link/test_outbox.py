"""A lease is begun once and answered once; its answer stays until the trainer has it, and its bytes are counted."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from producer.link.outbox import Outbox
from protocol.wire.messages import Group, Nack


def test_it_is_full_above_its_bytes_and_not_at_them():
    small = Group("small", 0, bytes(4), bytes(8), bytes(20), bytes(20), bytes(8), bytes(2), 0.0, 0.0)
    large = Group("large", 0, bytes(4), bytes(8), bytes(40), bytes(40), bytes(8), bytes(2), 0.0, 0.0)
    outbox = Outbox(102)  # 4 + 8 + 40 + 40 + 8 + 2
    for each in (small, large):
        outbox.begin(each.lease_id)
    outbox.finish(large)
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (1, 102, False)
    outbox.finish(small)
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (2, 164, True)
    outbox.replace(Nack("small", "generation_failed", "too large"))
    assert (outbox.num_groups, outbox.num_bytes, outbox.full) == (1, 102, False)
    assert outbox.held() == ["large", "small"]
    assert outbox.settle("large")
    assert (outbox.num_groups, outbox.num_bytes) == (0, 0)


def test_a_group_comes_due_again_after_fifteen_seconds_or_with_the_next_connection():
    outbox, group = Outbox(0), Group("lease", 0, b"", b"", b"", b"", b"", b"", 0.0, 0.0)
    outbox.begin("lease")
    outbox.finish(group)
    outbox.note_sent(group, 100.0)
    assert (outbox.due(114.9), outbox.due(115.0)) == ([], [group])
    outbox.forget_sends()
    assert outbox.due(100.1) == [group]


class OutboxMachine(RuleBasedStateMachine):
    """Against a plain model: per lease, `None` while it is worked on, else its answer and when it was last sent."""

    MAX_BYTES = 100

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(self.MAX_BYTES)
        self.now = 0.0
        self.model: dict[str, tuple[Group | Nack, float | None] | None] = {}

    lease_ids = st.integers(0, 3).map(str)

    def finished(self, lease_id: str) -> bool:
        return self.model.get(lease_id) is not None

    @rule(lease_id=lease_ids)
    def begin(self, lease_id: str) -> None:
        assert self.outbox.begin(lease_id) == (lease_id not in self.model)
        self.model.setdefault(lease_id, None)

    def answer(self, answer: Group | Nack) -> None:
        waited_for = answer.lease_id in self.model and not self.finished(answer.lease_id)
        assert self.outbox.finish(answer) == waited_for
        if waited_for:
            del self.model[answer.lease_id]
            self.model[answer.lease_id] = (answer, None)

    @rule(lease_id=lease_ids, size=st.integers(0, 60))
    def finish(self, lease_id: str, size: int) -> None:
        self.answer(Group(lease_id, 0, b"", b"", bytes(size), b"", b"", b"", 0.0, 0.0))

    @rule(lease_id=lease_ids)
    def refuse(self, lease_id: str) -> None:
        self.answer(Nack(lease_id, "returned"))

    @rule(wait_s=st.sampled_from([0.0, 1.0, 14.0, 15.0]), carried=st.booleans())
    def send_what_is_due(self, wait_s: float, carried: bool) -> None:
        self.now += wait_s
        expected = [
            entry[0]
            for entry in self.model.values()
            if entry is not None and (entry[1] is None or self.now - entry[1] >= 15.0)
        ]
        assert self.outbox.due(self.now) == expected
        if not carried:  # nobody listens
            return
        for answer in expected:
            self.outbox.note_sent(answer, self.now)
            if isinstance(answer, Nack):
                del self.model[answer.lease_id]
            else:
                self.model[answer.lease_id] = (answer, self.now)

    @rule(lease_id=lease_ids)
    def settle(self, lease_id: str) -> None:
        assert self.outbox.settle(lease_id) == self.finished(lease_id)
        if self.finished(lease_id):
            del self.model[lease_id]

    @rule(lease_id=lease_ids)
    def drop(self, lease_id: str) -> None:
        """The trainer does not know this lease."""
        worked_on = lease_id in self.model and not self.finished(lease_id)
        assert self.outbox.abandon(lease_id) == worked_on
        if worked_on:
            del self.model[lease_id]

    @rule(lease_id=lease_ids)
    def replace(self, lease_id: str) -> None:
        if self.finished(lease_id):
            refusal = Nack(lease_id, "generation_failed")
            self.outbox.replace(refusal)
            del self.model[lease_id]
            self.model[lease_id] = (refusal, None)

    @rule()
    def another_session(self) -> None:
        """Also of another process of the same run: nothing is lost but what was under way."""
        self.outbox.forget_sends()
        self.model = {each: entry and (entry[0], None) for each, entry in self.model.items()}

    @rule()
    def another_run(self) -> None:
        assert self.outbox.void() == len(self.model)
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        answers = {lease_id: entry[0] for lease_id, entry in self.model.items() if entry is not None}
        groups = [answer for answer in answers.values() if isinstance(answer, Group)]
        total = sum(len(group.completion_ids) for group in groups)
        assert self.outbox.held() == sorted(set(self.model) - set(answers)) + list(answers)
        assert self.outbox.num_held == len(self.model)
        assert (self.outbox.num_groups, self.outbox.num_bytes) == (len(groups), total)
        assert self.outbox.full == (total > self.MAX_BYTES)
        assert self.outbox.all_settled == (not answers)


TestOutboxAgainstAModel = OutboxMachine.TestCase
