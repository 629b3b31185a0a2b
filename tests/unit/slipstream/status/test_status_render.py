"""The view as text."""

import io
import re

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from slipstream.run_reader import Ended
from slipstream.status.reading import View, read
from slipstream.status.render import render
from slipstream.status.warnings import warnings
from slipstream.tables import duration, percent, rate, shortened, sparkline
from tests.unit.slipstream.status.builders import PRODUCER, answer, producer, seen


def full_view() -> View:
    return replace(read([[answer(), answer(PRODUCER)]]), rewards={step: step / 100 for step in range(1, 200)})


def lines(view: View, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render(view, warnings(view), width))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_is_as_wide_as_the_view_and_none_is_cut(width: int) -> None:
    shown = lines(full_view(), width)
    assert {cell_len(line) for line in shown} == {width}
    rows = [re.sub(r"^  (\S*) .*", r"\1", line) for line in shown if re.match(r"  (held )?[a-z0-9-]+  ", line)]
    assert rows == [
        *("step", "reward", "learning", "off-policy", "rollouts", "held"),
        *("waits", "staleness", "trainer", "tokens", "groups", "answers", "trouble", "storage"),
        *(
            "source",
            "sums",
            "products",
            "environment",
            "dice",
            "maze",
            "rank",
            "0",
            "1",
            "producer",
            "far-9-cd",
            "gpu0-7-ab",
            "engine",
            "gpu0-7-ab",
        ),
    ], "one line for each, so that none was wrapped"
    assert "…" not in "".join(shown)


def test_the_view_says_what_the_numbers_are() -> None:
    shown = "\n".join(lines(full_view(), 80))
    for text in (
        "run ab12 · release 0.1.0",
        "30 of 60, about 3 min left",
        "1.990 ± 0.250  steps 1-199",
        "trainer 67 % since its start, now for 1.5 s",
        "mean 1.5, max 2, bound 2 versions",
        "version 20 0.5 · best 0.625 · now 3 of 8 prompts",
        "version 30 published · last step 2.0 s ago, one in 6.0 s",
        "100/s generated · 50/s trained",
        "42 leased · 6 ready · 3 replayable · 1 rerolls waiting",
        "486 accepted · 20 no signal · 0 stale · 480 trained",
        "4 leases expired · 2 dead letters",
        "journal 4.0 MiB, commits 4.0 ms · disk 25 % full, limit 95 %",
        "trainer waits 67 % of the time for rollouts: add a producer",
    ):
        assert text in shown, text
    assert re.search(r"far-9-cd +- +- +20 held +- +- +- *$", shown, re.M)
    assert re.search(r"gpu0-7-ab +v29 +1 +1 · 20 · 0 · 1 +200/s +10 % +200 ms *$", shown, re.M)
    assert re.search(r"gpu0-7-ab +220 +300 +75 % *$", shown, re.M)


def test_each_of_several_sources_has_a_row() -> None:
    shown = lines(full_view(), 80)
    assert any(re.search(r"sums +298 +10 +3 +62 % +2\.25 +75 % +0\.625", line) for line in shown), shown
    assert not any("of batch" in line for line in lines(seen({}), 80))


def test_each_of_several_environments_has_a_row() -> None:
    shown = "\n".join(lines(full_view(), 80))
    assert re.search(r"dice +4 +298 +10 +3 +0 +2\.25 +75 % *$", shown, re.M)
    assert re.search(r"maze +skipped +0 +0 +40 +16 +- +- *$", shown, re.M)
    assert "given up" not in "\n".join(lines(seen({}), 80))


def test_a_trainer_of_several_ranks_has_a_row_for_each() -> None:
    shown = "\n".join(lines(full_view(), 80))
    assert re.search(r"rank +step +waits for others +tokens +memory", shown)
    assert re.search(r"0 +2\.0 s +5 % +1,000 +1\.0 GiB", shown)
    assert re.search(r"1 +1\.5 s +40 % +700 +512\.0 MiB", shown)


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("trainer", "with the trainer since 3.0 s"),
        ("producers", "with the producers since 3.0 s"),
        ("changing", "producers leave it since 3.0 s"),
    ],
)
def test_whose_turn_it_is_on_one_gpu(side: str, text: str) -> None:
    turn = {name: int(name == side) for name in ("producers", "changing", "trainer")}
    spent = {"producers": 6.0, "changing": 1.0, "trainer": 3.0}
    shown = "\n".join(lines(seen({"step": 1, "gpu_turn": turn, "gpu_turn_age_s": 3.0, "gpu_turn_s": spent}), 80))
    assert f"{text} · trainer 30 %, producers 60 %" in shown
    assert "GPU" not in "\n".join(lines(seen({"step": 1, "gpu_turn": dict.fromkeys(turn, 0)}), 100))


def test_a_view_of_nothing_says_what_to_do() -> None:
    assert "no daemon of this run answers: start it" in " ".join(lines(seen(rewards={1: 0.5}), 80))
    assert "nothing to complain about" in "\n".join(lines(seen({"step": 1, "max_steps": 9}), 80))


def test_a_run_that_has_finished_is_no_trouble_and_one_that_was_stopped_can_go_on() -> None:
    shown = "\n".join(lines(seen(rewards={60: 0.5}, ended=Ended(60, True, 1e9)), 80))
    assert "finished at step 60, 2001-09-09" in shown
    assert "nothing to complain about" in shown
    shown = " ".join(lines(seen(ended=Ended(40, False, 1e9)), 80))
    assert "the run was stopped at step 40: rl-trainer --resume goes on" in shown


def test_a_daemon_that_does_not_answer_is_gone() -> None:
    shown = "\n".join(lines(seen({}, producer(error="x", name="p1")), 80))
    assert re.search(r"p1 +gone ", shown)
    assert "producer p1: x: start it again" in " ".join(shown.replace("\n", " ").split())


def test_names_from_the_wire_neither_move_the_cursor_nor_are_markup() -> None:
    shown = "\n".join(lines(seen({"run": "[red]x\x1b[2J"}, producer(name="a\n[b]\x07")), 80))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert r"[red]x\x1b[2J" in shown
    assert r"a\n[b]\x07" in shown


def test_durations_rates_and_shares_have_a_unit() -> None:
    seconds = (None, 0.0043, 0.07, 1.25, 75.0, 600.0, 9000.0, 300_000.0)
    assert [duration(s) for s in seconds] == ["-", "4.3 ms", "70 ms", "1.2 s", "75 s", "10 min", "2.5 h", "3.5 days"]
    assert [rate(r) for r in (None, 0.25, 12345.6)] == ["-", "0.2/s", "12,346/s"]
    assert percent(0.614) == "61 %"


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█", "neighbours share a character"
    assert sparkline([3.0, 3.0], 8) == "▄▄"
    assert sparkline([], 8) == ""


def test_a_long_name_keeps_its_ends() -> None:
    assert shortened("host-gpu7-1234-abcd", 10) == "hos…4-abcd"
    assert shortened("short", 10) == "short"


def test_a_dead_reward_is_the_first_line_of_a_run_and_of_one_that_ended() -> None:
    running = seen({"dead_rewards": {"ramp": 12, "exact": 0}, "step": 3, "max_steps": 9})
    ended = replace(seen(), ended=Ended(3, True, 1e9, {"ramp": 12}))
    for view in (running, ended):
        first = next(line for line in lines(view, 80)[1:] if line.strip())
        assert "the reward ramp gave no number to any completion of 12 groups" in first
