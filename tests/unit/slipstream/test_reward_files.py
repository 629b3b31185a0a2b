"""Reward functions of Python code: which file or module other processes find them in, and which are refused."""

import functools
import importlib.util
import linecache
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.config.functions import load_function
from protocol.errors import ConfigError
from slipstream.reward_files import place_of

CELL = """
import math
import numpy as np
from fractions import Fraction as F
from json import loads

LIMIT = 3
def helper(text):
    return len(text)

def alone(completions, **_):
    return [float(len(text)) for text in completions]

def importing(completions, scale: "int" = 2, **_: object) -> list[float]:
    return [float(F(math.floor(np.float64(loads(text))) * scale)) for text in completions]

async def later(completions, **_):
    return [math.pi] * len(completions)

def with_a_constant(completions, **_):
    return [float(len(text) > LIMIT) for text in completions]

def with_a_helper(completions, **_):
    return [float(helper(text)) for text in completions]

def counting(completions, **_):
    global LIMIT
    LIMIT += 1
    return [float(LIMIT)]

def make(weight):
    def inner(completions, **_):
        return [weight] * len(completions)
    return inner

class Scorer:
    def method(self, completions, **_):
        return [0.0]
    def __call__(self, completions, **_):
        return [0.0]
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a notebook's cell, or a script, has defined."""
    file = tmp_path / "cell.py"
    file.write_text(CELL)
    spec = importlib.util.spec_from_file_location("__main__", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_of_an_importable_file_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_of_this_test.py").write_text("def short(completions, **_):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_rewards_of_this_test")
    place = place_of(module.short, tmp_path / "rewards", tmp_path)
    assert place == f"{tmp_path / 'my_rewards_of_this_test.py'}:short"
    assert not (tmp_path / "rewards").exists()
    monkeypatch.delitem(sys.modules, module.__name__)


def test_names_and_functions_of_packages_stay_names(tmp_path: Path) -> None:
    assert place_of("exact_match", tmp_path, tmp_path) == "exact_match"
    assert place_of("rewards.py:mine", tmp_path, tmp_path) == "rewards.py:mine"
    assert place_of(load_function, tmp_path, tmp_path) == "protocol.config.functions:load_function"


def test_a_package_that_only_this_process_finds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "home" / "package_of_this_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def short(completions, **_):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(package.parent)
    module = importlib.import_module(package.name)
    assert place_of(module.short, tmp_path / "rewards", package.parent) == f"{package.name}:short"
    with pytest.raises(ConfigError, match=f"does not find `{package.name}` from {tmp_path}"):
        place_of(module.short, tmp_path / "rewards", tmp_path)
    monkeypatch.delitem(sys.modules, module.__name__)


@pytest.mark.parametrize(("name", "given"), [("alone", ["abc"]), ("importing", ["1.5", "7"])])
def test_a_function_of_a_cell_that_needs_only_imports_is_written_as_it_is(
    cell: Any, tmp_path: Path, name: str, given: list[str]
) -> None:
    place = place_of(getattr(cell, name), tmp_path / "run" / "rewards", tmp_path)
    assert load_function(place, "rewards")(completions=given) == getattr(cell, name)(completions=given)
    assert place_of(getattr(cell, name), tmp_path / "run" / "rewards", tmp_path) == place


def test_a_coroutine_function_is_written_too(cell: Any, tmp_path: Path) -> None:
    loaded = load_function(place_of(cell.later, tmp_path / "rewards", tmp_path), "rewards")
    coroutine = loaded(completions=["a", "b"])
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert ended.value.value == [math.pi, math.pi]


def test_another_text_is_another_file(cell: Any, tmp_path: Path) -> None:
    """A run that goes on keeps the functions with which it began."""
    first = place_of(cell.alone, tmp_path / "rewards", tmp_path)
    (tmp_path / "cell.py").write_text(CELL.replace("float(len(text)) for", "float(-len(text)) for"))
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "cell.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.checkcache()
    second = place_of(module.alone, tmp_path / "rewards", tmp_path)
    assert first != second
    assert load_function(first, "rewards")(completions=["abc"]) == [3.0]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a lambda": (lambda cell: lambda completions, **_: [0.0], "no function"),
    "a closure": (lambda cell: cell.make(0.5), "no function"),
    "a method": (lambda cell: cell.Scorer().method, "no function"),
    "an object": (lambda cell: cell.Scorer(), "no function"),
    "a partial": (lambda cell: functools.partial(cell.alone, scale=3), "no function"),
    "a constant": (lambda cell: cell.with_a_constant, "`LIMIT`"),
    "a helper": (lambda cell: cell.with_a_helper, "`helper`"),
    "a global that changes": (lambda cell: cell.counting, "`LIMIT`"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_other_function_is_refused_with_the_fix(cell: Any, tmp_path: Path, what: str) -> None:
    make, why = REFUSED[what]
    with pytest.raises(ConfigError) as refused:
        place_of(make(cell), tmp_path / "rewards", tmp_path)
    assert why in str(refused.value)
    assert "%%writefile rewards.py" in str(refused.value)
    assert not (tmp_path / "rewards").exists()


def test_a_function_whose_source_is_not_known_is_refused(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(completions, **_):\n    return [1.0]", names)
    with pytest.raises(ConfigError, match="source is not known"):
        place_of(names["typed"], tmp_path / "rewards", tmp_path)
