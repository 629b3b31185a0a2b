"""YAML's errors in plain words, with the line that is to be changed."""

import pytest
import yaml

from protocol.config.yaml_words import fault_of


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("model:\n\tpath: x\n", 2, "tab"),
        ("model:\n  path: x\n\tdtype: y\n", 3, "tab"),
        ("a: 1\r\n\tb: 2\r\n", 2, "tab"),
        ("trainer:\n  max_steps:10\n  beta: 1\n", 2, "`max_steps:`"),
        ("trainer:\n  max_steps:10\n\n  # a comment\n  beta: 1\n", 2, "`max_steps:`"),
        ("trainer:\n  beta: 1\n  max_steps:10\nsft: {}\n", 3, "`max_steps:`"),
        ("run_dir:x\nmodel:\n  path: y\n", 1, "`run_dir:`"),
        ("rewards:\n  functions:\n    -function: x\n      weight: 2\n", 3, "`-`"),
        ("model:\n  path: a: b\n", 2, "colon"),
        ("rewards:\n  functions:\n  - function: rewards.py: exact\n", 3, "colon"),
        ("model\n  path: x\n", 1, "colon is missing"),
        ("model:\n  path x\n  dtype: y\n", 2, "colon is missing"),
        ("model:\n  path: x\n    dtype: y\n", 3, "indented"),
        ("model:\n  path: x\n dtype: y\n", 3, "indentation"),
        ("  model: 1\nseed: 2\n", 2, "indentation"),
        ("a:\n  - b\n  c: d\n", 3, "indentation"),
        ('model:\n  path: "x\n  dtype: y\n', 2, "quote"),
        ('model:\n  path: "x\n  dtype: "y"\n', 2, "quote"),
        ("model:\n  path: 'x\nseed: 3\n", 2, "quote"),
        ('model:\n  path: "x" y\n', 2, "quote"),
        ("lora:\n  target_modules: [q, v\nseed: 1\n", 2, "`[`"),
        ("lora: {r: 3\nseed: 1\n", 1, "`{`"),
        ("lora: {r: 3 a: 4}\n", 1, "comma"),
        ("model: [", 1, "bracket"),
        ("model: [\n\n", 1, "bracket"),
        ("a: ]\n", 1, "bracket"),
        ("a: %x\n", 1, "`%`"),
        ("%x\n", 1, "`%`"),
        ("a: @x\n", 1, "`@`"),
        ("lora:\n  target_modules: *.q_proj\n", 2, "`*`"),
        ("seed: *nowhere\n", 1, "`*`"),
        ("a: !!python/object/apply:os.getcwd []", 1, "`!`"),
        ('a: "\\d+"\n', 1, "single quotes"),
        ("a: 1\n---\nb: 2\n", 2, "document"),
        ("? [a, b]\n: 1\n", 1, "key"),
        ("a: 1\nseed: 2024-13-45\n", 2, "2024-13-45"),
        ("seed: !!timestamp x", 1, "tag"),
    ],
)
def test_the_line_to_change_and_what_is_wrong_with_it(text: str, line: int, word: str) -> None:
    with pytest.raises((yaml.YAMLError, ValueError, AttributeError)) as caught:
        yaml.load(text, yaml.CSafeLoader)
    fault = fault_of(text, caught.value)
    assert fault.line == line, fault
    assert word in fault.text


def test_what_has_no_words_keeps_those_of_yaml() -> None:
    mark = yaml.Mark("", 0, 1, 0, "", 0)
    assert fault_of("a\nb\n", yaml.MarkedYAMLError(problem="something new", problem_mark=mark)) == (2, "something new")
    assert fault_of("", yaml.YAMLError("odd")) == (None, "odd")
    assert fault_of("", RecursionError()).line is None
