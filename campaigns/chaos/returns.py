"""The attempts at prompts: none is forgotten, and one comes back after a failure alone.

Guarantee: pure functions, of the rows that a journal holds when the run is over and of what its last checkpoint waits for.
"""

from collections import defaultdict

from campaigns.chaos.known import Evidence, Key, Row, Verdict


def check_returns(evidence: Evidence, verdict: Verdict) -> None:
    rows_of: dict[Key, list[Row]] = defaultdict(list)
    for row in evidence.rows.values():
        if row.outcome != "stale":
            rows_of[row.key].append(row)
    verdict.rerolls = sum(key[2] > 0 for key in rows_of)
    _check_own_turns(evidence, verdict)
    for key in rows_of:
        if key[2] > 0:
            _check_reason(evidence, key, rows_of, verdict)
    _check_failures(evidence, set(rows_of), verdict)


def _check_own_turns(evidence: Evidence, verdict: Verdict) -> None:
    """Every prompt had its first attempt in every epoch that is over, unless it was in cooldown."""
    rows = evidence.rows.values()
    settled = evidence.dead | evidence.unsettled
    settled |= {row.key for row in rows if row.outcome == "no_signal" or row.dropped == "quarantined"}
    settled |= {row.key for row in rows if row.outcome == "accepted" and row.dropped is None}
    in_cooldown = {
        (epoch, row.prompt_id, 0)
        for row in rows
        if row.is_solved and row.outcome != "stale"
        for epoch in range(row.epoch + 1, row.epoch + 1 + evidence.rules.cooldown_epochs)
    }
    for epoch in range(evidence.epoch):
        for prompt_id in range(evidence.num_prompts):
            if (epoch, prompt_id, 0) not in settled | in_cooldown:
                verdict.add("forgotten", f"prompt {prompt_id} of epoch {epoch} was neither trained nor given up")


def _check_reason(evidence: Evidence, key: Key, rows_of: dict[Key, list[Row]], verdict: Verdict) -> None:
    """A prompt came back: it had failed, and the policy is newer by then."""
    epoch, prompt_id, reroll = key
    failed = [row for row in rows_of[(epoch, prompt_id, reroll - 1)] if row.has_failed] if reroll else []
    came = min(row.policy_version for row in rows_of[key])
    if reroll > evidence.rules.max_rerolls or not failed:
        verdict.add("reroll", f"prompt {prompt_id} of epoch {epoch} came back for the {reroll}. time without a reason")
    elif came < min(row.policy_version for row in failed) + evidence.rules.delay_versions:
        verdict.add("reroll", f"prompt {prompt_id} of epoch {epoch} came back to version {came}, too early")


def _check_failures(evidence: Evidence, answered: set[Key], verdict: Verdict) -> None:
    """A prompt failed: it came back, waits to, or had or awaits its first attempt of a later epoch."""
    seen = answered | evidence.dead | evidence.unsettled | evidence.deferred
    for row in evidence.rows.values():
        trained = row.step is not None and row.step <= evidence.final_step
        is_settled = row.outcome == "no_signal" or (row.outcome == "accepted" and row.dropped is None and trained)
        if not (row.has_failed and is_settled and row.seq <= evidence.checkpoint_seq):
            continue
        epoch, prompt_id, reroll = row.key
        if reroll >= evidence.rules.max_rerolls or (epoch, prompt_id, reroll + 1) in seen:
            continue
        if not any((later, prompt_id, 0) in seen for later in range(epoch + 1, evidence.epoch + 2)):
            verdict.add("reroll", f"prompt {prompt_id} of epoch {epoch} failed as {row.lease_id} and never came back")
