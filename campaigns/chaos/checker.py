"""What must be true of a run that was killed again and again, decided from evidence that the run did not write itself.

Guarantee: pure functions; every breach of a promise becomes a `Problem` that names the group, and nothing else does.

The promises: a group whose producer was told `accepted` was trained for the first time once in the surviving lineage, or
the journal says why it will not be, or it is still ready, and not so old that a trainer who knew of it would have dropped
it. What was trained is what was acknowledged, byte for byte, and in the step that the journal names. A group is replayed
only after its first training, no more often and no later than the configuration allows, and every time in the step and at
the position that the journal names. No turn of a prompt is trained twice, and none is forgotten; a prompt comes back after
a failure alone (`campaigns.chaos.returns`). Every other answer has its explanation.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from campaigns.chaos.known import Batch, Evidence, Incarnation, Key, Replay, Verdict, key_of, lineage
from campaigns.chaos.returns import check_returns


def check(evidence: Evidence) -> Verdict:
    verdict = Verdict()
    steps = lineage(evidence.incarnations)
    expected = range(1, evidence.final_step + 1)
    for step in sorted(set(expected) ^ set(steps)):
        verdict.add("steps", f"step {step} {'was trained beyond the end' if step in steps else 'was never trained'}")
    trained = _trained(steps, verdict)
    replayed = _replayed(steps, verdict)
    verdict.num_replays = sum(map(len, replayed.values()))
    _check_accepted(evidence, trained, verdict)
    _check_ready(evidence, steps, verdict)
    _check_journal(evidence, trained, verdict)
    _check_replays(evidence, trained, replayed, verdict)
    _check_prompts(evidence, trained, verdict)
    _check_other_answers(evidence, verdict)
    check_returns(evidence, verdict)
    return verdict


class _Trained(NamedTuple):
    first: int
    last: int
    digest: str
    position: int


def _fresh(batch: Batch) -> tuple[tuple[str, str], ...]:
    return batch.groups[: batch.num_fresh]


def _is_next_iteration(steps: Mapping[int, Batch], step: int, before: _Trained) -> bool:
    """Whether `before`, which trained a group, and `step` are iterations over the same batch."""
    return before.last == step - 1 and steps[step].last_step == steps[step - 1].last_step


def _trained(steps: Mapping[int, Batch], verdict: Verdict) -> dict[str, _Trained]:
    """Every group of the lineage, with the run of steps that trained it for the first time."""
    result: dict[str, _Trained] = {}
    for step in sorted(steps):
        ids = [lease_id for lease_id, _ in steps[step].groups]
        for position, (lease_id, digest) in enumerate(_fresh(steps[step])):
            before = result.get(lease_id)
            same_batch = before is not None and _is_next_iteration(steps, step, before)
            where = f"was in steps {before.first} to {before.last}" if before is not None else "in it twice"
            if ids.count(lease_id) > 1 or (before is not None and not same_batch):
                verdict.add("trained_twice", f"group {lease_id} is in step {step}, and {where}")
            if before is not None and before.digest != digest:
                verdict.add("content", f"group {lease_id} changed between steps {before.first} and {step}")
            result[lease_id] = _Trained(before.first if before else step, step, digest, position)
    return result


def _replayed(steps: Mapping[int, Batch], verdict: Verdict) -> dict[str, list[_Trained]]:
    """Every further use of a group, with its run of steps."""
    result: dict[str, list[_Trained]] = defaultdict(list)
    for step in sorted(steps):
        batch = steps[step]
        again = batch.groups[batch.num_fresh :]
        for position, (lease_id, digest) in enumerate(again, batch.num_fresh):
            uses = result[lease_id]
            if [other for other, _ in again].count(lease_id) > 1:
                verdict.add("trained_twice", f"group {lease_id} is replayed twice in step {step}")
            if uses and _is_next_iteration(steps, step, uses[-1]):
                uses[-1] = uses[-1]._replace(last=step)
            else:
                uses.append(_Trained(step, step, digest, position))
    return result


def _check_accepted(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    accepted = {answer.lease_id: answer for answer in evidence.answers if answer.outcome == "accepted"}
    for lease_id, answer in accepted.items():
        row = evidence.rows.get(lease_id)
        if lease_id in trained:
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
            verdict.add("lost", f"group {lease_id} was accepted from {answer.producer} and never trained; {where}")
        if row is not None and row.outcome != "accepted":
            verdict.add("outcome", f"group {lease_id} was acknowledged as accepted, the journal says {row.outcome}")
    for answer in evidence.answers:
        if answer.digest is None or answer.outcome not in ("accepted", "no_signal", "stale"):
            continue
        seen = {"the journal": evidence.rows.get(answer.lease_id), "training": trained.get(answer.lease_id)}
        for place, found in seen.items():
            if found is not None and found.digest != answer.digest:
                verdict.add("content", f"group {answer.lease_id} of {answer.producer} has other content in {place}")


def _check_ready(evidence: Evidence, steps: Mapping[int, Batch], verdict: Verdict) -> None:
    """Whoever cuts a batch drops what has become too old, if it has not forgotten it."""
    if (last := steps.get(evidence.final_step)) is None:
        return
    oldest = (last.step - 1) // evidence.rules.sync_interval - evidence.rules.max_staleness
    for row in evidence.rows.values():
        if row.outcome == "accepted" and row.dropped is None and row.step is None and row.policy_version < oldest:
            verdict.add(
                "forgotten",
                f"group {row.lease_id} of version {row.policy_version} is still ready, and step {last.step} took none older than "
                f"{oldest}",
            )


def _check_journal(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    for lease_id, place in trained.items():
        row = evidence.rows.get(lease_id)
        if row is None:
            verdict.add("journal", f"group {lease_id} was trained in step {place.first} and is not in the journal")
            continue
        partly = row.dropped == "quarantined" and row.last_step == place.last  # some of its iterations are kept
        if row.outcome != "accepted" or (row.dropped is not None and not partly):
            verdict.add("journal", f"group {lease_id} was trained, the journal says {row.dropped or row.outcome}")
        if (row.step, min(row.last_step or 0, evidence.final_step)) != (place.first, place.last):
            verdict.add(
                "journal",
                f"group {lease_id} was trained in steps {place.first} to {place.last}, the journal says {row.step} to "
                f"{row.last_step}",
            )
    for row in evidence.rows.values():
        claimed = row.outcome == "accepted" and row.dropped is None and row.step is not None
        if claimed and row.step <= evidence.final_step and row.lease_id not in trained:  # type: ignore[operator]
            verdict.add("journal", f"the journal says that step {row.step} trained {row.lease_id}; it did not")


def _check_replays(
    evidence: Evidence,
    trained: Mapping[str, _Trained],
    replayed: Mapping[str, list[_Trained]],
    verdict: Verdict,
) -> None:
    rules, recorded = evidence.rules, set[Replay]()
    known = {replay for replay in evidence.replays if replay.step <= evidence.final_step}
    known = {replay._replace(last_step=min(replay.last_step, evidence.final_step)) for replay in known}
    for lease_id, uses in replayed.items():
        first, row = trained.get(lease_id), evidence.rows.get(lease_id)
        if 1 + len(uses) > rules.max_times_sampled:
            verdict.add("too_often", f"group {lease_id} was trained and replayed {len(uses)} times")
        for use in uses:
            recorded.add(Replay(use.first, use.last, use.position, lease_id))
            if first is None or first.last >= use.first:
                verdict.add(
                    "too_early", f"group {lease_id} was replayed in step {use.first}, and was not trained before"
                )
            elif first.digest != use.digest:
                verdict.add("content", f"group {lease_id} changed between steps {first.first} and {use.first}")
            version = (use.first - 1) // rules.sync_interval
            if row is not None and version - row.policy_version > rules.max_age_versions:
                verdict.add("too_late", f"group {lease_id} of version {row.policy_version} was replayed at {version}")
    for replay in sorted(recorded - known):
        verdict.add("unrecorded", f"the journal does not say what happened: {replay}")
    for replay in sorted(known - recorded):
        verdict.add("journal", f"the journal says what did not happen: {replay}")


def _check_prompts(evidence: Evidence, trained: Mapping[str, _Trained], verdict: Verdict) -> None:
    by_key: dict[Key, list[str]] = defaultdict(list)
    for lease_id in trained:
        if lease_id in evidence.rows:
            by_key[evidence.rows[lease_id].key].append(lease_id)
    for (epoch, prompt_id, reroll), lease_ids in by_key.items():
        if len(lease_ids) > 1:
            turn = f"prompt {prompt_id} of epoch {epoch}" + (f", return {reroll}," if reroll else "")
            verdict.add("prompt_twice", f"{turn} was trained as {', '.join(lease_ids)}")


def _check_other_answers(evidence: Evidence, verdict: Verdict) -> None:
    answered: dict[Key, set[str]] = defaultdict(set)
    for row in evidence.rows.values():
        answered[row.key].add(row.lease_id)
    newest = _newest_cut(evidence.incarnations) // evidence.rules.sync_interval
    for answer in evidence.answers:
        row = evidence.rows.get(answer.lease_id)
        match answer.outcome:
            case "no_signal":
                explained = row is not None and row.outcome == "no_signal" and not row.has_signal
            case "stale":
                explained = row is not None and row.outcome == "stale"
                explained = explained and row.policy_version < newest - evidence.rules.max_staleness  # type: ignore[union-attr]
            case "duplicate":
                key = key_of(answer.lease_id)
                explained = row is not None or bool(answered[key]) or key in evidence.dead
                # A return whose deferral a crash undid, or that gave way to the prompt's next first attempt, is not wanted.
                explained = explained or (key[2] > 0 and bool(answered[(key[0], key[1], key[2] - 1)]))
            case "invalid":
                explained = False
            case _:
                continue
        if not explained:
            verdict.add("unexplained", f"{answer.producer} was told {answer.outcome} for {answer.lease_id}, {row}")


def _newest_cut(incarnations: Iterable[Incarnation]) -> int:
    """The optimizer steps before the batch that would have been cut next, at most."""
    return max((batch.last_step for incarnation in incarnations for batch in incarnation.batches), default=0)
