"""The chance of a signal: numbers by hand, what fades, what sources and verdicts tell apart, and what a checkpoint keeps."""

import json

from replay.signal_chances import HALF_LIFE, GradedGroup, SignalChances


def by_hundreds() -> SignalChances:
    """Prompts 0 to 99 are of source 0, the next hundred of source 1, and so on."""
    return SignalChances(lambda prompt_id: prompt_id // 100)


def test_what_is_not_known_is_tried() -> None:
    assert by_hundreds().chance(0, 0) == 1.0


def test_the_share_of_groups_with_signal_among_prompts_of_the_source() -> None:
    chances = by_hundreds()
    for prompt_id, has_signal in enumerate([False, False, True, False]):
        chances.note(GradedGroup(prompt_id, "failed", has_signal, 3))
    assert chances.chance(50, 3) == (1 + 2) / (4 + 2)
    assert chances.chance(150, 3) == 1.0


def test_a_prompt_that_was_answered_is_judged_by_those_with_its_verdict() -> None:
    chances = by_hundreds()
    for prompt_id in range(4):
        chances.note(GradedGroup(prompt_id, "solved" if prompt_id < 2 else "mixed", prompt_id >= 2, 0))
    assert chances.chance(0, 0) == 1.0, "no solved prompt came a second time"
    chances.note(GradedGroup(0, "solved", False, 0))
    chances.note(GradedGroup(2, "mixed", True, 0))
    assert chances.chance(1, 0) == 2 / 3
    assert chances.chance(3, 0) == 3 / 3
    assert chances.chance(9, 0) == (2 + 2) / (4 + 2), "new ones are judged by the first groups alone"


def test_what_is_known_fades_with_the_versions_and_an_old_group_is_no_step_back() -> None:
    chances = by_hundreds()
    for prompt_id in range(2):
        chances.note(GradedGroup(prompt_id, "failed", False, 8))
    later = 8 + int(HALF_LIFE)
    assert chances.chance(9, 8) == 2 / 4
    assert chances.chance(9, later) == 2 / 3
    chances.note(GradedGroup(2, "failed", False, later))
    assert chances.chance(9, later) == 2 / 4
    chances.note(GradedGroup(3, "failed", False, 8))
    assert chances.chance(9, later) == chances.chance(9, 0) == 2 / 5


def test_a_checkpoint_keeps_all() -> None:
    chances, again = by_hundreds(), by_hundreds()
    for number in range(60):
        chances.note(GradedGroup(number * 7 % 300, ("failed", "mixed", "solved")[number % 3], number % 3 == 1, number))
    again.restore(json.loads(json.dumps(chances.state())))
    assert [again.chance(each, 61) for each in range(300)] == [chances.chance(each, 61) for each in range(300)]
    assert again.state() == chances.state()
