"""What must be true of a run that was killed again and again, decided from evidence that the run did not write itself.

Guarantee: pure functions; every breach of a promise becomes a `Problem` that names the group, and nothing else does. The
surviving lineage is what the last checkpoints kept: a trainer process that starts at checkpoint C undoes every later step
of the processes before it.

The promises: a group whose producer was told `accepted` was trained once in the surviving lineage, or the journal says why
it will not be, or it is still ready. What was trained is what was acknowledged, byte for byte, and in the step that the
journal names. No prompt is trained twice in an epoch, and none is forgotten. Every other answer has its explanation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[int, int]


class Answer(NamedTuple):
    """An acknowledgement or a refusal that reached a producer."""

    producer: str
    lease_id: str
    outcome: str
    digest: str | None  # of the group that it held; None if it held none any more


class Batch(NamedTuple):
    """What was handed to training: the groups (id and digest) of the steps `step` to `last_step`, from 1."""

    step: int
    last_step: int
    groups: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Incarnation:
    """One trainer process that got as far as training."""

    start_step: int
    batches: tuple[Batch, ...]
    steps_ended: frozenset[int]


@dataclass(frozen=True)
class Row:
    """A group as the journal shows it when the run is over."""

    group_id: str
    epoch: int
    prompt_id: int
    policy_version: int
    outcome: str
    step: int | None
    last_step: int | None
    dropped: str | None
    digest: str
    has_signal: bool

    @property
    def key(self) -> Key:
        return (self.epoch, self.prompt_id)


@dataclass(frozen=True)
class Evidence:
    answers: Sequence[Answer]
    incarnations: Sequence[Incarnation]
    rows: Mapping[str, Row]  # also of groups that retention has deleted since
    dead: frozenset[Key]  # prompts that were given up
    final_step: int
    max_staleness: int
    sync_interval: int  # optimizer steps per policy version
    num_prompts: int
    epoch: int  # of the ledger in the last checkpoint; all prompts of earlier ones were given out
    unsettled: frozenset[Key]  # of that checkpoint


class Problem(NamedTuple):
    kind: str
    text: str


@dataclass
class Verdict:
    problems: list[Problem] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)  # of the accepted groups

    def add(self, kind: str, text: str) -> None:
        self.problems.append(Problem(kind, text))

    def count(self, kind: str) -> int:
        return sum(problem.kind == kind for problem in self.problems)


def lineage(incarnations: Sequence[Incarnation]) -> dict[int, Batch]:
    """The batch of every step that survived."""
    survived: dict[int, Batch] = {}
    for incarnation in incarnations:
        survived = {step: batch for step, batch in survived.items() if step <= incarnation.start_step}
        for batch in incarnation.batches:
            steps = range(max(batch.step, incarnation.start_step + 1), batch.last_step + 1)
            survived |= {step: batch for step in steps if step in incarnation.steps_ended}
    return survived


def check(evidence: Evidence) -> Verdict:
    verdict = Verdict()
    steps = lineage(evidence.incarnations)
    expected = range(1, evidence.final_step + 1)
    for step in sorted(set(expected) ^ set(steps)):
        verdict.add("steps", f"step {step} {'was trained beyond the end' if step in steps else 'was never trained'}")
    trained = _trained(steps, verdict)
    _check_accepted(evidence, trained, verdict)
    _check_journal(evidence, trained, verdict)
    _check_prompts(evidence, trained, verdict)
    _check_other_answers(evidence, verdict)
    return verdict


class _Trained(NamedTuple):
    first: int
    last: int
    digest: str


def _trained(steps: Mapping[int, Batch], verdict: Verdict) -> dict[str, _Trained]:
    """Every group of the lineage, with the run of steps that trained it."""
    result: dict[str, _Trained] = {}
    for step in sorted(steps):
        ids = [group_id for group_id, _ in steps[step].groups]
        for group_id, digest in steps[step].groups:
            before = result.get(group_id)
            same_batch = before is not None and before.last == step - 1
            same_batch = same_batch and steps[step].last_step == steps[step - 1].last_step  # its next iteration
            where = f"was in steps {before.first} to {before.last}" if before is not None else "in it twice"
            if ids.count(group_id) > 1 or (before is not None and not same_batch):
                verdict.add("trained_twice", f"group {group_id} is in step {step}, and {where}")
            if before is not None and before.digest != digest:
                verdict.add("content", f"group {group_id} changed between steps {before.first} and {step}")
            result[group_id] = _Trained(before.first if before else step, step, digest)
    return result


def _check_accepted(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    accepted = {answer.lease_id: answer for answer in evidence.answers if answer.outcome == "accepted"}
    for group_id, answer in accepted.items():
        row = evidence.rows.get(group_id)
        if group_id in trained:
            fate = "trained"
        elif row is None:
            fate = "lost"
        elif row.dropped is not None:
            fate = row.dropped
        elif row.step is None or row.step > evidence.final_step:
            fate = "ready"
        else:
            fate = "lost"
        verdict.fates[fate] += 1
        if fate == "lost":
            where = f"the journal says step {row.step}" if row else "the journal does not know it"
            verdict.add("lost", f"group {group_id} was accepted from {answer.producer} and never trained; {where}")
        if row is not None and row.outcome != "accepted":
            verdict.add("outcome", f"group {group_id} was acknowledged as accepted, the journal says {row.outcome}")
    for answer in evidence.answers:
        if answer.digest is None or answer.outcome not in ("accepted", "no_signal", "stale"):
            continue
        seen = {"the journal": evidence.rows.get(answer.lease_id), "training": trained.get(answer.lease_id)}
        for place, found in seen.items():
            if found is not None and found.digest != answer.digest:
                verdict.add("content", f"group {answer.lease_id} of {answer.producer} has other content in {place}")


def _check_journal(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    for group_id, place in trained.items():
        row = evidence.rows.get(group_id)
        if row is None:
            verdict.add("journal", f"group {group_id} was trained in step {place.first} and is not in the journal")
            continue
        partly = row.dropped == "quarantined" and row.last_step == place.last  # some of its iterations are kept
        if row.outcome != "accepted" or (row.dropped is not None and not partly):
            verdict.add("journal", f"group {group_id} was trained, the journal says {row.dropped or row.outcome}")
        if (row.step, min(row.last_step or 0, evidence.final_step)) != (place.first, place.last):
            verdict.add(
                "journal",
                f"group {group_id} was trained in steps {place.first} to {place.last}, the journal says {row.step} to "
                f"{row.last_step}",
            )
    for row in evidence.rows.values():
        claimed = row.outcome == "accepted" and row.dropped is None and row.step is not None
        if claimed and row.step <= evidence.final_step and row.group_id not in trained:  # type: ignore[operator]
            verdict.add("journal", f"the journal says that step {row.step} trained {row.group_id}; it did not")


def _check_prompts(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    rows = evidence.rows
    by_key: dict[Key, list[str]] = defaultdict(list)
    for group_id in trained:
        if group_id in rows:
            by_key[rows[group_id].key].append(group_id)
    for key, group_ids in by_key.items():
        if len(group_ids) > 1:
            verdict.add("prompt_twice", f"prompt {key[1]} of epoch {key[0]} was trained as {', '.join(group_ids)}")
    settled = set(by_key) | evidence.dead | evidence.unsettled
    settled |= {row.key for row in rows.values() if row.outcome == "no_signal" or row.dropped == "quarantined"}
    settled |= {row.key for row in rows.values() if row.outcome == "accepted" and row.dropped is None}
    for epoch in range(evidence.epoch):
        for prompt_id in range(evidence.num_prompts):
            if (epoch, prompt_id) not in settled:
                verdict.add("forgotten", f"prompt {prompt_id} of epoch {epoch} was neither trained nor given up")


def _check_other_answers(evidence: Evidence, verdict: Verdict) -> None:
    answered: dict[Key, set[str]] = defaultdict(set)
    for row in evidence.rows.values():
        answered[row.key].add(row.group_id)
    newest = _newest_cut(evidence.incarnations) // evidence.sync_interval
    for answer in evidence.answers:
        row = evidence.rows.get(answer.lease_id)
        match answer.outcome:
            case "no_signal":
                explained = row is not None and row.outcome == "no_signal" and not row.has_signal
            case "stale":
                explained = row is not None and row.outcome == "stale"
                explained = explained and row.policy_version < newest - evidence.max_staleness  # type: ignore[union-attr]
            case "duplicate":
                key = key_of(answer.lease_id)
                explained = row is not None or bool(answered[key]) or key in evidence.dead
            case "invalid":
                explained = False
            case _:
                continue
        if not explained:
            verdict.add("unexplained", f"{answer.producer} was told {answer.outcome} for {answer.lease_id}, {row}")


def _newest_cut(incarnations: Iterable[Incarnation]) -> int:
    """The optimizer steps before the batch that would have been cut next, at most."""
    return max((batch.last_step for incarnation in incarnations for batch in incarnation.batches), default=0)


def key_of(lease_id: str) -> Key:
    epoch, prompt_id, *_ = lease_id.split("-")
    return (int(epoch), int(prompt_id))
