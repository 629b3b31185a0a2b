"""The rewards of the task `digits`."""

from benchmarks.digits import all_right, answer_of, each_right, how_many_right
from producer.rewards.spans import Spans


def test_each_place_has_its_shift() -> None:
    assert answer_of("123456") == "494392"
    assert answer_of("999999") == "260835"


def test_rewards_are_for_all_digits_for_their_number_and_for_each() -> None:
    completions, answer = ["494392", "4943920", "404390", "94", ""], ["494392"] * 5
    ids = [[3] * (len(text) + 1) for text in completions]
    assert all_right(completions, answer) == [1, 0, 0, 0, 0]
    assert how_many_right(completions, answer) == [6, 6, 4, 0, 0]
    spans = each_right(completions, ids, answer)
    assert spans[2] == {"tokens": [(1, 1.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 0.0)]}
    assert [len(one["tokens"]) for one in spans] == [6, 6, 6, 3, 1]
    for one, text, tokens in zip(spans, completions, ids, strict=True):
        Spans.of(one, text, len(tokens))
