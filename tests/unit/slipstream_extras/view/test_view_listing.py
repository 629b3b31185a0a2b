"""Paging, sorting, filtering and searching give what SQL over the journal gives."""

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.journal.schema import STATES, GroupRow
from replay.sources import Sources
from slipstream.run_reader import RunReader
from slipstream_extras.view.index.cache import opened
from slipstream_extras.view.index.listing import SORTS, Cursor, Wanted, neighbours, page
from slipstream_extras.view.index.rows import UNSCORED, VERDICTS
from slipstream_extras.view.index.texts import words
from slipstream_extras.view.pages.forms import FormError, cursor_of, list_fields, versions, wanted_of, with_cursor
from slipstream_extras.view.server.compare_pages import attempts, by_version, compare, mean_rewards
from tests.view_run import MARKS, completion_text, prompt_text

KEYS: dict[str, Callable[[GroupRow], float]] = {
    "arrival": lambda row: row.seq,
    "reward": lambda row: UNSCORED if row.reward is None else row.reward,
    "tokens": lambda row: row.num_tokens,
    "version": lambda row: row.policy_version,
    "step": lambda row: row.step or 0,
}


@pytest.fixture(scope="module")
def rows(written_run: Path) -> list[GroupRow]:
    with closing(RunReader(written_run).journal()) as reader:
        return list(reader.rows())


def longest(prompt: int) -> int:
    """In tokens: of the bytes of a completion each is one, and each mark."""
    texts = [completion_text(prompt, number) for number in range(3)]
    for mark in MARKS:
        texts = [text.replace(mark, "x") for text in texts]
    return max(len(text.encode()) for text in texts)


def fits(row: GroupRow, wanted: Wanted) -> bool:
    def within(value: float | None, low: float | None, high: float | None) -> bool:
        return (low is None and high is None) or (
            value is not None and (low is None or value >= low) and (high is None or value <= high)
        )

    text = "\n".join([prompt_text(row.prompt_id), *(completion_text(row.prompt_id, number) for number in range(3))])
    return (
        wanted.state in (None, row.state)
        and wanted.verdict in (None, row.verdict)
        and wanted.producer in (None, row.producer)
        and wanted.prompt in (None, row.prompt_id)
        and within(row.step, wanted.least_step, wanted.most_step)
        and within(row.prompt_id, wanted.least_prompt, wanted.most_prompt)
        and within(row.policy_version, wanted.least_version, wanted.most_version)
        and within(row.reward, wanted.least_reward, wanted.most_reward)
        and within(row.num_tokens, wanted.least_tokens, wanted.most_tokens)
        and within(longest(row.prompt_id), wanted.least_length, wanted.most_length)
        and wanted.replayed in (None, row.num_replays > 0)
        and wanted.truncated in (None, row.prompt_id % 5 == 0)
        and wanted.text in text
    )


def expected(rows: list[GroupRow], wanted: Wanted) -> list[int]:
    fitting = [row for row in rows if fits(row, wanted)]
    fitting.sort(key=lambda row: (KEYS[wanted.sort](row), row.seq), reverse=not wanted.ascending)
    return [row.seq for row in fitting]


bounds = st.none() | st.integers(0, 30)
wanted_lists = st.builds(
    Wanted,
    state=st.none() | st.sampled_from(STATES),
    verdict=st.none() | st.sampled_from(VERDICTS),
    producer=st.sampled_from([None, "producer-0", "producer-9"]),
    prompt=st.none() | st.integers(0, 41),
    least_prompt=st.sampled_from([None, 20]), most_prompt=st.sampled_from([None, 30]),
    least_step=bounds, most_step=bounds, least_version=bounds, most_version=bounds,
    least_reward=st.sampled_from([None, 0.0, 0.4]), most_reward=st.sampled_from([None, 0.0, 0.7]),
    least_tokens=st.sampled_from([None, 150]), most_tokens=st.sampled_from([None, 170]),
    least_length=st.sampled_from([None, 46]), most_length=st.sampled_from([None, 50]),
    replayed=st.sampled_from([None, False, True]), truncated=st.sampled_from([None, False, True]),
    text=st.sampled_from(["", "apples", "Let me count", "script"]), sort=st.sampled_from(SORTS), ascending=st.booleans(),
)  # fmt: skip
few_filters = st.builds(
    Wanted, sort=st.sampled_from(SORTS), ascending=st.booleans(), truncated=st.sampled_from([None, True])
)


@pytest.mark.long
@given(wanted=wanted_lists | few_filters, size=st.integers(1, 50))
def test_all_pages_together_are_the_list(rows: list[GroupRow], written_index: Path, wanted: Wanted, size: int) -> None:
    whole = expected(rows, wanted)
    with opened(written_index) as db:
        assert db is not None
        at = page(db, wanted, None, size)
        pages = [at]
        while at.after is not None:
            at = page(db, wanted, at.after, size)
            pages.append(at)
        assert [seq for one in pages for seq in one.seqs] == whole
        assert all(len(one.seqs) == size for one in pages[:-1])
        for before, after in pairwise(pages):  # and back again
            assert after.before is not None
            assert page(db, wanted, after.before, size).seqs == before.seqs
        assert pages[0].before is None
        for place, seq in list(enumerate(whole))[:5]:
            near = (whole[place - 1] if place else None, whole[place + 1] if place + 1 < len(whole) else None)
            assert neighbours(db, wanted, seq) == near


def test_a_group_that_the_index_does_not_know_has_no_neighbours(index: apsw.Connection) -> None:
    assert neighbours(index, Wanted(sort="reward"), 10_000) == (None, None)


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("apple pear", ['"apple"', '"pear"']),
        ('say "let me count" now', ['"say"', '"let me count"', '"now"']),
        ('" * - NEAR( ) "', ['"* - NEAR( )"']),
        ("*", []),
        ("column:word OR -x", ['"column:word"', '"OR"', '"-x"']),
    ],
)
def test_what_people_type_is_words_and_never_syntax(index: apsw.Connection, query: str, asked: list[str]) -> None:
    assert list(words(query)) == asked
    page(index, Wanted(text=query), None, 5)  # raises no error


def test_prompts_are_followed_over_versions(index: apsw.Connection) -> None:
    # Prompt 1 is group 1, 41 and 81, of versions 0, 10 and 20, with 0, 1 and 2 of 3 solved; the middle one's number is 41.
    assert attempts(index, 1) == [2, 42, 82]
    assert by_version(index, 1) == [(0, 1, 0.0), (10, 1, pytest.approx(1 / 3)), (20, 1, pytest.approx(2 / 3))]
    old, new = mean_rewards(index, (0, 5)), mean_rewards(index, (20, 25))
    gained = compare(old, new, gained=True)
    one = {found.prompt: found for found in gained}[1]
    assert (one.before, one.after, one.newest_before, one.newest_after) == (0.0, pytest.approx(2 / 3), 2, 82)
    assert compare(old, old, gained=True) == []
    lost = compare(new, old, gained=False)
    assert {found.prompt for found in lost} == {found.prompt for found in gained}


def test_a_url_says_all_of_a_list() -> None:
    query = {
        "q": " apple ", "state": "trained", "verdict": "mixed", "step": "3", "version": "2:", "reward": ":-0.5", "tokens": "1:9",
        "length": "5:", "prompt": "7", "producer": "p", "replayed": "no", "truncated": "yes", "sort": "reward",
        "order": "ascending", "colour": "mask",
    }  # fmt: skip
    assert wanted_of(query) == Wanted(
        state="trained", verdict="mixed", producer="p", prompt=7, least_step=3, most_step=3, least_version=2,
        most_reward=-0.5, least_tokens=1, most_tokens=9, least_length=5, replayed=False, truncated=True, text="apple",
        sort="reward", ascending=True,
    )  # fmt: skip
    assert "colour" not in list_fields(query)
    assert wanted_of({}) == Wanted()
    assert wanted_of({}).is_plain
    assert not wanted_of({"sort": "step"}).is_plain


def test_a_source_is_its_range_of_prompts() -> None:
    sources = Sources.of(["sums", "words"], [10, 5])
    assert wanted_of({"source": "sums"}, sources) == Wanted(least_prompt=0, most_prompt=9)
    wanted = wanted_of({"source": "words"}, sources)
    assert wanted.least_prompt == 10
    assert wanted.most_prompt is not None
    assert wanted.most_prompt > 1_000_000
    assert "source" in list_fields({"source": "words"})
    with pytest.raises(FormError, match=r"^source: "):
        wanted_of({"source": "gone"}, sources)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("value", [0.1 + 0.2, -1e300, 3.0])
def test_a_cursor_goes_through_a_url_exactly(value: float, back: bool) -> None:
    from urllib.parse import parse_qsl

    cursor = Cursor(value, 17, back)
    query = with_cursor({"sort": "reward"}, cursor)
    assert query is not None
    assert cursor_of(dict(parse_qsl(query))) == cursor
    assert with_cursor({}, None) is None


@pytest.mark.parametrize(
    "query",
    [
        {"step": "x"}, {"step": "3:1"}, {"reward": "nan"}, {"tokens": "1.5"}, {"state": "gone"}, {"sort": "seq; DROP"},
        {"q": "a" * 201}, {"q": "a\0b"}, {"at": "1"}, {"at": "inf,3"}, {"at": "1,x"}, {"prompt": "9" * 30}, {"replayed": "1"},
        {"step": "1:2:3"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_name_of_the_field(query: dict[str, Any]) -> None:
    (name,) = query
    with pytest.raises(FormError, match=f"^{name}: "):
        wanted_of(query), cursor_of(query)


def test_ranges_of_versions() -> None:
    assert versions({"a": "3:5"}, "a") == (3, 5)
    assert versions({"a": "3"}, "a") == (3, 3)
    assert versions({"a": ":5"}, "a") == (0, 5)
    assert versions({}, "a") is None
