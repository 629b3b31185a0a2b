"""The limit of completions in the engine: how preemptions lower it, and how it rises again."""

from producer.engine_contract import EngineLoad
from producer.rollouts.admission import ROOM, AdmissionControl


def load(usage: float = 0.5, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(usage, 8, 0, preemptions)


def test_more_preemptions_than_are_tolerated_lower_the_limit_by_a_quarter_of_what_is_inside():
    control = AdmissionControl(40, 8)
    assert not control.look(16, 100, load(preemptions=128)), "one for each of 16 x 8 completions"
    assert control.limit == 320
    assert control.look(16, 100, load(preemptions=129))
    assert control.limit == 75
    assert not control.look(16, 100, load(preemptions=129)), "the same preemptions are not counted twice"
    assert control.limit == 75


def test_every_group_that_leaves_pays_for_as_many_as_its_completions():
    control = AdmissionControl(4, 8)
    for left in range(1, 100):
        control.note_left(4, 32, load(usage=1.0, preemptions=8 * left))
    assert control.limit == 32
    for left in range(1, 14):
        assert control.limit == 32
        control.note_left(4, 32, load(usage=1.0, preemptions=792 + 10 * left))
    assert control.limit == 24, "2 more than tolerated each time: the 13th finds 12 x 2 + 10, and 32 are tolerated"


def test_a_decrease_is_not_repeated_before_the_groups_that_were_inside_have_left():
    control = AdmissionControl(4, 1)
    control.look(4, 4, load(preemptions=5))
    for left in range(1, 4):
        control.note_left(4, 4, load(preemptions=5 + 6 * left))
        assert control.limit == 3
    control.note_left(4, 4, load(preemptions=29))
    assert control.limit == 3, "the fourth was inside, too"
    control.look(3, 3, load(preemptions=33))
    assert control.limit == 2, "0.75 x 3 = 2.25"


def test_it_rises_by_about_a_group_in_a_round_of_groups_while_it_is_what_keeps_them_out():
    control = AdmissionControl(20, 8)
    control.look(16, 128, load(preemptions=129))
    for _ in range(32):
        control.note_left(32, 100, load(preemptions=129))
    assert control.limit == 104, "96 + 32 x 8 / 32"
    for _ in range(1000):
        control.note_left(24, 90, load(preemptions=129))
        control.note_left(24, 104, load(usage=ROOM, preemptions=129))
    assert control.limit == 104, "neither with room for a group nor with a cache that is nearly full"
    for _ in range(1000):
        control.note_left(24, 160, load(preemptions=129))
    assert control.limit == 160


def test_it_stays_between_a_group_and_the_ceiling():
    control = AdmissionControl(3, 4)
    for step in range(1, 9):
        control.note_left(1, 1, load(preemptions=100 * step))
        assert control.limit == 4
    for _ in range(9):
        control.note_left(3, 12, load(preemptions=800))
    assert control.limit == 12


def test_it_is_calm_again_when_the_groups_that_were_inside_at_a_preemption_have_left():
    control = AdmissionControl(4, 8)
    assert control.is_calm
    control.look(2, 16, load(preemptions=1))
    control.note_left(2, 16, load(preemptions=1))
    assert (control.is_calm, control.limit) == (False, 32)
    control.note_left(2, 16, load(preemptions=1))
    assert control.is_calm
