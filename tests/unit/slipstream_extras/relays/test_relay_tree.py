"""Who asks which relay: by hand for small fleets, and what holds for every fleet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_extras.relays.directory import FAN_OUT, MOST_SOURCES, Host, sources


def fleet(region: str, num: int, *, relays: bool = True) -> list[Host]:
    return [Host(f"{region}{number}", region, relays) for number in range(num)]


def test_a_region_far_away_gets_one_copy_and_hands_it_down() -> None:
    found = sources(fleet("eu", 7), "us")
    assert found["eu0"] == [], "the head asks the trainer"
    assert [found[f"eu{number}"] for number in (1, 2, 4)] == [["eu0"], ["eu0", "eu1"], ["eu0", "eu1"]]
    assert found["eu5"] == ["eu1", "eu0"], "its parent's first child is itself"
    assert found["eu6"] == ["eu1", "eu5", "eu0"]


def test_the_trainer_is_the_head_of_its_own_region() -> None:
    found = sources(fleet("us", 6), "us")
    assert [found[f"us{number}"] for number in range(4)] == [[]] * 4
    assert [found[f"us{number}"] for number in (4, 5)] == [["us0"], ["us0", "us4"]]


def test_heads_of_many_regions_form_a_tree_of_their_own() -> None:
    hosts = [Host(f"h{number}", f"h{number}", relays=True) for number in range(7)]
    found = sources(hosts, "trainer's")
    assert [len(found[f"h{number}"]) for number in range(4)] == [0] * 4
    assert [found[f"h{number}"] for number in (4, 5, 6)] == [["h0"], ["h0", "h4"], ["h0", "h4"]]


def test_hosts_without_a_relay_are_dealt_out_and_where_nobody_relays_all_ask_the_trainer() -> None:
    found = sources([*fleet("eu", 2), *(Host(f"x{n}", "eu", relays=False) for n in range(3))], "us")
    assert [found[f"x{n}"] for n in range(3)] == [["eu0"], ["eu1", "eu0"], ["eu0"]]
    assert sources(fleet("eu", 3, relays=False), "us") == {"eu0": [], "eu1": [], "eu2": []}


hosts = st.lists(
    st.tuples(st.sampled_from("abcde"), st.booleans()),
    max_size=60,
).map(lambda drawn: [Host(str(number), region, relays) for number, (region, relays) in enumerate(drawn)])


@pytest.mark.long
@given(hosts)
def test_of_every_fleet_the_way_to_the_trainer_is_short_and_without_circles(drawn: list[Host]) -> None:
    found = sources(drawn, "a")
    relays = {host.name for host in drawn if host.relays}
    assert set(found) == {host.name for host in drawn}
    order = {name: place for place, name in enumerate(found)}
    for host in drawn:
        asked = found[host.name]
        assert len(asked) == len(set(asked)) <= MOST_SOURCES
        assert host.name not in asked
        assert set(asked) <= relays

    def depth(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, "they wait for each other"
        return 1 + max((depth(source, (*above, name)) for source in found[name]), default=0)

    assert all(depth(name) <= 60 for name in order)
    children = [found[name][0] for name in relays if found[name]]
    assert all(children.count(name) <= 2 * FAN_OUT for name in relays)
    for region in {host.region for host in drawn if host.relays} - {"a"}:
        inside = [host.name for host in drawn if host.region == region and host.relays]
        outside = [name for name in inside if not set(found[name]) & set(inside)]
        assert outside == inside[:1], "one copy enters a region"
