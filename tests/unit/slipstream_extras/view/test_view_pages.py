"""Spans, turns, lanes, curves and the table of steps, with numbers worked by hand."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.groups import GroupShape, RolloutGroup
from replay.journal.schema import PolicyRow
from slipstream.decoder import find_decoder
from slipstream.journal.content import ContentReader
from slipstream.run_reader import RunReader
from slipstream_extras.view.pages.charts import (
    Curve,
    Segment,
    binned,
    charts,
    compared,
    coverage,
    lanes,
    span_of,
    staleness_shares,
)
from slipstream_extras.view.pages.forms import FormError
from slipstream_extras.view.pages.group import Colour, GroupPage, Span, group_page, spans, turns
from slipstream_extras.view.pages.steps import Swap, policy_rows, sorted_steps
from tests.unit.replay.builders import SHAPE, group_message
from tests.view_run import HOSTILE, START, step_line


def kinds(colour: Colour) -> list[str]:
    group = SHAPE.parse(
        group_message(
            logprobs=np.array([-0.01, 0.0, np.nan, -8.5], "<f4").tobytes(), sampled=bytes([1, 0, 1, 1]),
            token_versions=np.array([0, 0, 9, 2], "<i4").tobytes(),
        )
    )  # fmt: skip
    return [span.kind for span in spans(group, slice(0, 4), ["a", "b", "c", "d"], colour)]


def test_tokens_have_the_colour_of_their_numbers() -> None:
    assert kinds("logprob") == ["l0", "masked", "unscored", "l7"]
    assert kinds("version") == ["v0", "masked", "v1", "v2"]  # nine versions later the colours begin again
    assert kinds("mask") == ["sampled", "masked", "sampled", "sampled"]
    assert kinds("none") == ["", "masked", "", ""]


def test_hovering_says_the_numbers() -> None:
    group = SHAPE.parse(group_message(version=3))
    first, *_ = spans(group, slice(0, 3), ["\u202ex\n", "b", "c"], "logprob")
    assert first == Span("\\u202ex\n", "l2", "id 3 '\\\\u202ex\\\\n', log-prob -0.1000, version 3")
    credit = {"credit": np.array([0, 0.5, 0, 0], "<f4").tobytes(), "span_ends": bytes([0, 1, 0, 1])}
    _, rewarded, _ = spans(SHAPE.parse(group_message(**credit)), slice(0, 3), ["a", "b", "c"], "logprob")
    assert "0.5" in rewarded.title
    teacher = np.array([0, -1.25, 0, 0], "<f4").tobytes()
    top = {
        "teacher_top_ids": np.array([3, -1, 7, 6, 5, 1, 6, -1], "<i4").tobytes(),
        "teacher_top_logprobs": np.array([0, 0, -0.625, -2.5, 0, -20, 0, 0], "<f4").tobytes(),
    }
    taught, _ = spans(SHAPE.parse(group_message(teacher_logprobs=teacher, **top)), slice(1, 3), ["b", "c"], "logprob")
    assert all(number in taught.title for number in ("-1.25", "id 7 -0.625", "id 6 -2.5"))


CHAT = "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<think>\nHm</think>\n\n<tool_call>add</tool_call>5<|im_end|>"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_marks_of_a_template_become_turns(size: int) -> None:
    """However the tokens cut the text."""
    pieces = [Span(CHAT[start : start + size], f"k{start}") for start in range(0, len(CHAT), size)]
    found = [(turn.role, "".join(span.text for span in turn.spans)) for turn in turns(pieces)]
    assert found == [("user", "Add."), ("thinking", "Hm"), ("tool call", "add"), ("assistant", "5")]
    kinds = {span.text: span.kind for turn in turns(pieces) for span in turn.spans}
    assert size > 1 or kinds["H"] == f"k{CHAT.index('Hm')}"


def test_a_text_without_marks_is_one_turn() -> None:
    assert [(turn.role, turn.spans) for turn in turns([Span("a"), Span("b")], "assistant")] == [
        ("assistant", [Span("a"), Span("b")])
    ]
    llama = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert [(turn.role, turn.spans) for turn in turns([Span(llama)])] == [("user", [Span("Hi")])]
    assert turns([Span(" \n")]) == []


def page_of(run: Path, lease_id: str, **options: bool) -> GroupPage:
    with closing(RunReader(run).journal()) as reader:
        row = reader.row(lease_id)
        assert row is not None
        content = ContentReader(reader).read(row)
        assert content is not None
        facts = reader.facts()
    decoder = None if options.get("ids") else find_decoder(facts)[0]
    return group_page(content, facts, decoder, "logprob", raw=options.get("raw", False), first=0)


def test_completions_are_sorted_by_reward_and_read_as_people_write_them(written_run: Path) -> None:
    shown = page_of(written_run, "2-3-0-1-s")  # group 83 of 120 has two of three solved
    assert [(one.number, one.total, one.rewards) for one in shown.completions] == [
        (2, 1.0, {"correct": 1.0}), (1, 1.0, {"correct": 1.0}), (3, 0.0, {"correct": 0.0}),
    ]  # fmt: skip
    assert [turn.role for turn in shown.prompt] == ["user"]
    (record,) = shown.completions[0].records
    assert [turn.role for turn in record.turns] == ["thinking", "assistant"]
    assert (record.num_masked, record.left_out, record.truncated) == (4, 0, False)
    hostile = "".join(span.text for turn in shown.completions[1].records[0].turns for span in turn.spans)
    assert hostile.endswith(HOSTILE.replace("\u202e", "\\u202e"))
    raw = page_of(written_run, "2-3-0-1-s", raw=True).completions[0].records[0].turns
    assert "".join(span.text for span in raw[0].spans).startswith("<think>Let me")
    ids = page_of(written_run, "2-3-0-1-s", ids=True).completions[0].records[0].turns
    assert "".join(span.text for span in ids[0].spans).replace(" ", "").isdecimal()


def test_of_an_unscored_completion_nothing_is_made_up(written_run: Path) -> None:
    shown = page_of(written_run, "0-10-0-1-s")
    assert [(one.total, one.rewards) for one in shown.completions] == [(None, {"correct": None})] * 3
    assert [one.missing["correct"] for one in shown.completions] == ["", "", ""]


def test_long_completions_lose_their_middle_and_nothing_is_made_of_it(
    written_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spans_of(page: GroupPage) -> list[Span]:
        return [span for turn in page.completions[0].records[0].turns for span in turn.spans]

    def counted(group: RolloutGroup, tokens: slice, *rest: Any) -> list[Span]:
        asked.append(tokens.stop - tokens.start)
        return spans(group, tokens, *rest)

    asked: list[int] = []
    whole = spans_of(page_of(written_run, "0-1-0-1-s", raw=True))
    monkeypatch.setattr("slipstream_extras.view.pages.group._TOKENS", 10)
    monkeypatch.setattr("slipstream_extras.view.pages.group.spans", counted)
    page = page_of(written_run, "0-1-0-1-s", raw=True)
    record, found = page.completions[0].records[0], spans_of(page)
    assert record.left_out == record.num_tokens - 20
    assert (found[:10], found[11:]) == (whole[:10], whole[-10:])
    assert found[10].text == f"\n[... {record.left_out} tokens left out ...]\n"
    assert set(asked) == {10}


def test_a_shape_of_another_size_still_has_pages() -> None:
    shape = GroupShape(2, 1, 2**31 - 1, 2**31 - 1)
    assert shape.parse(group_message()).num_completions == 2


def test_coverage_is_the_share_of_each_part() -> None:
    assert coverage([Segment(0, 1), Segment(1.5, 2.5, 0.5)], 0, 4, 4) == [1.0, 0.25, 0.25, 0.0]
    assert coverage([Segment(-5, 10), Segment(-5, 10)], 0, 2, 2) == [1.0, 1.0]
    assert coverage([Segment(3, 2)], 0, 4, 2) == [0.0, 0.0]
    assert coverage([Segment(0, 1)], 5, 5, 2) == [0.0, 0.0]


def test_lanes_of_both_daemons_have_one_axis() -> None:
    steps = [step_line(1), step_line(2), {"t": "damaged"}]  # wait 0.5 s, train 1.5 s, ends at 2 and 4
    events = [
        {"t": START, "event": "start"}, {"t": START + 1, "event": "stats", "busy_s": 0.0},
        {"t": START + 3, "event": "stats", "busy_s": 1.0}, {"t": START + 50, "event": "stats", "busy_s": 48.0},
        {"t": START + 51, "event": "start"}, {"t": START + 52, "event": "stats", "busy_s": 1.0},
        {"t": START + 4, "event": "swap", "ms": 1000.0},
    ]  # fmt: skip
    assert span_of(steps, {"p": events}) == (START, START + 52)
    assert span_of([], {}) is None
    trains, waits, rewards, generates, swaps = lanes(steps, {"p": events}, [(START + 2, 1.0)], START, START + 4)
    per_second = {lane.name: [sum(lane.shares[i : i + 300]) / 300 for i in range(0, 1200, 300)] for lane in (
        trains, waits, rewards, generates, swaps,
    )}  # fmt: skip
    assert per_second == {
        "trainer trains": pytest.approx([0.5, 1, 0.5, 1]), "trainer waits": pytest.approx([0.5, 0, 0.5, 0]),
        "rewards": pytest.approx([0, 1, 0, 0]), "p generates": pytest.approx([0, 0.5, 0.5, 0]),
        "p swaps": pytest.approx([0, 0, 0, 1]),
    }  # fmt: skip


def test_curves_are_means_of_neighbours_and_scores_stand_at_their_step() -> None:
    steps = [
        {"step": n, "t": float(n), "reward": n / 10, "wait_s": 1.0, "step_s": 1.0, "tokens": 6} for n in range(1, 5)
    ]
    assert binned(steps, 2) == [
        {"step": 1.5, "t": 1.5, "reward": pytest.approx(0.15), "wait_s": 1.0, "step_s": 1.0, "tokens": 6.0},
        {"step": 3.5, "t": 3.5, "reward": pytest.approx(0.35), "wait_s": 1.0, "step_s": 1.0, "tokens": 6.0},
    ]
    found = {
        chart.title: chart for chart in charts(steps, [{"step": 2, "score": 0.5}, {"step": 9, "score": 1}], [], None)
    }
    assert found["Reward"].curves == [
        Curve("reward", [0.1, 0.2, 0.3, 0.4]), Curve("held-out score", [None, 0.5, None, None], "points"),
    ]  # fmt: skip
    assert found["Tokens trained per second"].curves == [Curve("tokens/s", [3.0] * 4)]
    assert "Entropy, nats per token" not in found
    assert charts([], [], [], None) == []


def test_several_sources_have_curves_of_their_own() -> None:
    steps: list[dict[str, Any]] = [
        {
            "step": 1,
            "t": 1.0,
            "sources/sums/reward": 0.25,
            "sources/words/reward": 0.5,
            "sources/sums/batch_share": 1.0,
        },
        {"step": 2, "t": 2.0, "sources/sums/reward": 0.75},
    ]
    scores = [{"step": 2, "score": 0.5, "sources": {"sums": {"score": 0.75}, "words": {"score": 0.25}}}]
    found = {chart.title: chart for chart in charts(steps, scores, [], None)}
    assert found["Reward by source"].curves == [Curve("sums", [0.25, 0.75]), Curve("words", [0.5, None])]
    assert found["Batch by source, share of the groups"].curves == [Curve("sums", [1.0, None])]
    held_out = found["Held-out score by source"]
    assert (held_out.x, held_out.curves) == ([2], [Curve("sums", [0.75], "points"), Curve("words", [0.25], "points")])


def test_curves_stand_by_step_or_by_time() -> None:
    steps = [{"step": n, "t": 100.0 + 7 * n, "reward": n / 4, "policy_version": n - 1} for n in (1, 2, 3)]
    for by, x in (("step", [1, 2, 3]), ("time", [107.0, 114.0, 121.0])):
        reward = charts(steps, [{"step": 2, "score": 0.5}], [], None, by)[0]
        assert (reward.x, reward.by) == (x, by)
        assert reward.curves[1].values == [None, 0.5, None]
        ages = staleness_shares(steps, [(2, 1, 3), (3, 1, 1)], by)
        assert ages is not None
        assert ages.x == x[1:]


def test_two_runs_share_a_chart_of_what_either_knows() -> None:
    old = [{"step": n, "t": 1.0 * n, "reward": 0.5} for n in (1, 3)]
    new = [{"step": n, "t": 9.0 * n, "reward": 1.0, "entropy": 0.25} for n in (2, 3)]
    found = {chart.title: chart for chart in compared({"old": (old, []), "new": (new, [{"step": 2, "score": 0.75}])})}
    assert found["Reward"].x == [1, 2, 3]
    assert found["Reward"].curves == [Curve("old", [0.5, None, 0.5]), Curve("new", [None, 1.0, 1.0])]
    assert [curve.name for curve in found["Entropy, nats per token"].curves] == ["new"]
    assert found["Held-out score"].curves == [Curve("new", [0.75], "points")]
    assert compared({"old": ([], []), "new": ([], [])}) == []


def test_staleness_is_a_share_of_the_groups_of_each_step() -> None:
    steps: list[dict[str, Any]] = [
        {"step": 8, "t": 80.0, "policy_version": 7.0}, {"step": 9, "t": 90.0, "policy_version": 8.0}, {"step": 10},
    ]  # fmt: skip
    chart = staleness_shares(steps, [(8, 7, 3), (8, 6, 1), (9, 6, 1), (9, 1, 1), (10, 9, 4), (11, 9, 4)])
    assert chart is not None
    assert chart.x == [80.0, 90.0]
    assert {curve.name: curve.values for curve in chart.curves} == {
        "fresh": [0.75, 0.0], "1 version": [0.25, 0.0], "2 versions": [0.0, 0.5], "3 or more": [0.0, 0.5],
    }  # fmt: skip
    assert staleness_shares(steps, []) is None


def test_the_table_of_steps_sorts_filters_and_pages() -> None:
    lines = [{"step": n, "reward": None if n == 7 else n % 5 / 10, "staleness/mean": n} for n in range(1, 251)]
    first = sorted_steps(lines, {})
    assert [row[0] for row in first.rows[:2]] == [250, 249]
    assert (first.total, first.before, first.after) == (250, None, "page=1")
    found = sorted_steps(lines, {"where": "reward>=0.4 staleness<20", "sort": "reward", "order": "ascending"})
    assert [row[0] for row in found.rows] == [4, 9, 14, 19]
    assert found.links["reward"] == "where=reward%3E%3D0.4+staleness%3C20&sort=reward&order=descending"
    assert [row[0] for row in sorted_steps(lines, {"sort": "reward", "page": "2"}).rows][-1] == 7  # has none


@pytest.mark.parametrize(
    "query", [{"where": "reward<x"}, {"where": "gone<1"}, {"where": "reward"}, {"sort": "x"}, {"page": "-1"}]
)
def test_a_table_that_makes_no_sense_is_refused(query: dict[str, str]) -> None:
    (name,) = query
    with pytest.raises(FormError, match=f"^{name}: "):
        sorted_steps([], query)


def test_policies_know_their_swaps_refusals_and_scores() -> None:
    policies = [PolicyRow(version, version, "d", 1.0) for version in range(3)]
    events: list[dict[str, Any]] = [
        {"event": "swap", "version": 1, "ms": 10.0, "load_ms": 5.0, "probe_difference": 2e-6},
        {"event": "swap_refused", "version": 2, "reason": "r"},
        {"event": "swap", "version": "x", "ms": 1.0}, {"event": "stats"},
    ]  # fmt: skip
    two, one, zero = policy_rows(policies, {"producer-p.jsonl": events}, [{"version": 1, "score": 0.5}])
    assert (two.refusals, two.swaps, two.score) == ([("p", "r")], [], None)
    assert (one.swaps, one.score) == ([Swap("p", 10.0, 5.0, None, 2e-6)], 0.5)
    assert (zero.swaps, zero.refusals) == ([], [])
