"""What fits where, by hand, and what is said of the rest."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster.plan import Need, amounts_text, missing_text, num_places, without_place
from tests.unit.slipstream.cluster.builders import PLAN

A, B = "10.0.0.5", "10.0.0.6"
FREE = {A: {"CPU": 16.0, "GPU": 4.0, f"node:{A}": 1.0}, B: {"CPU": 16.0, "GPU": 2.0, f"node:{B}": 1.0}}
TRAINER, PRODUCER = Need("the trainer", PLAN.trainer_needs), Need("a producer", PLAN.producer_needs)


def test_a_run_that_fits() -> None:
    assert without_place([TRAINER, *[PRODUCER] * 4], FREE) == []
    assert num_places(PLAN.producer_needs, FREE, 10) == 6
    assert FREE[A]["GPU"] == 4, "what is free was only looked at"


def test_what_has_no_place_is_named_with_what_is_free() -> None:
    homeless = without_place([TRAINER, *[PRODUCER] * 6], FREE)
    assert homeless == [PRODUCER] * 2
    assert missing_text(homeless, FREE) == (
        "2 times a producer: needs 1 GPU and 4 CPU on one node. "
        "10.0.0.5 has 4 GPU and 16 CPU free; 10.0.0.6 has 2 GPU and 16 CPU free"
    )


def test_the_trainer_is_packed_on_its_host() -> None:
    assert PLAN.trainer_needs == {"CPU": 8.0, "GPU": 2.0, "node:10.0.0.5": 0.001}
    only_b = {B: FREE[B]}
    assert without_place([TRAINER], only_b) == [TRAINER]
    assert "the trainer: needs 2 GPU and 8 CPU at 10.0.0.5 on one node. 10.0.0.6 has" in missing_text([TRAINER], only_b)
    split = {A: FREE[A] | {"GPU": 1.0}, B: FREE[B] | {"GPU": 1.0}}
    assert without_place([TRAINER], split) == [TRAINER], "one GPU here and one there are not two"


def test_nothing_is_missing_and_nothing_is_there() -> None:
    assert missing_text([], FREE) == ""
    assert missing_text([PRODUCER], {}).endswith("There is no node")
    assert amounts_text({"CPU": 0.5}) == "0 GPU and 0.5 CPU"


_AMOUNTS = st.fixed_dictionaries({"CPU": st.integers(0, 8).map(float), "GPU": st.integers(0, 4).map(float)})


@given(st.lists(_AMOUNTS, max_size=6), st.dictionaries(st.text("ab", min_size=1, max_size=3), _AMOUNTS, max_size=4))
def test_nodes_are_never_overbooked_and_a_small_need_is_left_out_only_if_no_node_has_room(needs, free) -> None:
    asked = [Need(str(number), amounts) for number, amounts in enumerate(needs)]
    homeless = without_place(asked, free)
    placed = [need for need in asked if need not in homeless]
    for kind in ("CPU", "GPU"):
        assert sum(need.amounts[kind] for need in placed) <= sum(amounts[kind] for amounts in free.values())
    if not homeless:
        return
    assert all(without_place([need], free) == [need] or placed for need in homeless)
