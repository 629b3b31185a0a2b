"""Mistakes that asynchronous trainers are known to have made, and the tests that show we do not make them.

Guarantee: none of these tests disappears, or is renamed, without somebody looking at what it was for.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MISTAKES = {
    # Importance correction
    "modes that mask clamp what they masked, so that nothing is masked": [
        ("unit/consumer/loss/test_importance.py", "test_mask_modes_do_not_clamp_again_what_they_masked"),
    ],
    "ratios of whole completions explode with their length": [
        (
            "unit/consumer/loss/test_importance.py",
            "test_a_sequence_ratio_explodes_with_length_and_a_geometric_mean_does_not",
        ),
        ("unit/consumer/loss/test_importance.py", "test_a_geometric_mean_does_not_depend_on_length"),
    ],
    "the clip is inverted for negative advantages": [
        (
            "unit/consumer/loss/test_correction_losses.py",
            "test_the_clip_binds_on_the_right_side_for_both_signs_of_the_advantage",
        ),
    ],
    # Replay
    "replayed groups keep the ratio of their first training": [
        (
            "unit/consumer/batches/test_batches_trained.py",
            "test_a_replayed_group_gets_its_ratio_from_the_policy_that_trains_it",
        ),
    ],
    "replay writes left-padded prompts into other widths: holes, and prompts without their end": [
        (
            "unit/consumer/batches/test_batches_trained.py",
            "test_a_replayed_group_has_no_holes_and_loses_no_prompt_end_in_other_widths",
        ),
    ],
    "the heap of the replay table freezes on the earliest data": [
        ("unit/replay/batches/test_replay_table.py", "test_the_replay_heap_freezes_on_the_earliest_data"),
    ],
    # Rerolls
    "the hook that puts rerolls in is never called": [
        (
            "unit/consumer/app/test_rollouts.py",
            "test_a_constant_format_reward_does_not_hide_a_failure_and_the_prompt_returns_to_a_newer_policy",
        ),
    ],
    "a constant format reward keeps failed prompts from being rerolled": [
        (
            "unit/consumer/app/test_rollouts.py",
            "test_a_constant_format_reward_does_not_hide_a_failure_and_the_prompt_returns_to_a_newer_policy",
        ),
    ],
    # Data
    "batches are served last in, first out": [
        ("unit/replay/test_buffer.py", "test_a_batch_holds_the_first_groups_and_everything_that_arrived"),
    ],
    "data carries no policy version": [
        (
            "unit/consumer/link/test_intake_groups.py",
            "test_the_versions_of_a_group_s_tokens_are_journaled_and_none_may_be_unpublished",
        ),
        ("integration/test_pair.py", "test_without_staleness_the_run_is_on_policy"),
    ],
    "one bad prompt ends the run, counts as a completion, or vanishes": [
        (
            "unit/consumer/link/test_dispatcher.py",
            "test_a_prompt_that_cannot_be_sent_fails_alone",
        ),
        (
            "unit/replay/test_buffer.py",
            "test_failures_are_counted_by_reason_and_prompts_given_up_become_dead_letters",
        ),
    ],
    # Processes
    "the wait for a reward worker has no end": [
        (
            "unit/producer/rewards/test_rewards.py",
            "test_groups_are_scored_side_by_side_and_after_a_hang_by_another_process",
        ),
    ],
    "a trainer polls a collector that is dead": [
        ("unit/consumer/test_waiting.py", "test_it_gives_up_after_the_stall_timeout_and_names_it"),
        (
            "unit/consumer/link/test_intake_presence.py",
            "test_a_silent_producer_is_given_up_and_its_leases_go_to_the_others",
        ),
    ],
    "engines of others on the same host are killed by name": [
        ("integration/test_pair.py", "test_each_waits_for_the_other_and_training_goes_on"),
        ("unit/protocol/runtime/test_kept_process.py", "test_everything_ends_when_the_daemon_is_killed"),
        ("unit/protocol/runtime/test_scratch.py", "test_what_a_killed_process_left_goes_and_nothing_else"),
    ],
    # The swap
    "a swap that failed is a warning, and generation goes on as if it had not": [
        (
            "unit/producer/policies/test_adapters.py",
            "test_a_version_that_cannot_be_loaded_or_is_not_computed_as_the_trainer_does_never_goes_live",
        ),
        ("integration/test_engine.py", "test_a_refused_adapter_or_request_leaves_the_engine_alive"),
    ],
    "adapters are delivered and never used": [
        ("integration/test_engine.py", "test_logprobs_after_a_swap_are_those_of_transformers_and_peft"),
    ],
}


def names_in(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, functions)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_has_its_test(mistake: str) -> None:
    for file, name in MISTAKES[mistake]:
        assert name in names_in(TESTS / file), f"{file} lost {name}, which shows that we do not: {mistake}"
