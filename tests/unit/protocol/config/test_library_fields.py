"""Arguments of a library, read from its source."""

import inspect
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from protocol.config import library_fields
from protocol.config.library_fields import fields, problems
from protocol.config.library_section import type_hint

SOURCE = """
raise ImportError("this is never imported")

@dataclass
class Base:
    rate: float = 0.1
    inherited: int = 1

@dataclass
class Options(Base):
    rate: Optional[float] = None
    names: list[str] | None = field(default=None, metadata={"help": "init=False"})
    mode: Literal["fast", "slow"] = "fast"
    table: Union[dict, str] = Config.table
    quoted: "int | None" = None
    kind: SchedulerType | str = "linear"
    _count: int = field(init=False, default=-1)
    VALID: ClassVar[list[str]] = ["a"]

    @property
    def method(
        self,
    ) -> None:
        local: int = 1

    late: str = ""
"""
UNUSUAL = '''
class Options(
Base
):
    rate: float = """
    def
"""
    late: str = ""
'''
CLASSES = (("somelib", "args.py", "Base"), ("somelib", "args.py", "Options"))


def assert_same_arguments(read: dict[str, Any], library: type) -> None:
    """Whether the names are all there, and the types that are plain are right."""
    assert set(read) == set(inspect.signature(library).parameters)
    plain = {name: hint for name, hint in read.items() if hint is not Any}
    assert plain == {name: type_hint(library, name) for name in plain}
    assert len(plain) > len(read) / 2


@pytest.fixture
def somelib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "somelib"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError")
    (folder / "args.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(library_fields.SOURCES, "engine", ("somelib.Options", CLASSES))
    fields.cache_clear()
    return folder


def test_a_dataclass_is_read_with_its_bases_and_without_what_is_no_argument(somelib: Path) -> None:
    assert fields(CLASSES) == {
        "rate": Optional[float],  # noqa: UP045 - as the source has it
        "inherited": int,
        "names": list[str] | None,
        "mode": Literal["fast", "slow"],
        "table": Union[dict, str],  # noqa: UP007
        "quoted": int | None,
        "kind": Any,
        "late": str,
    }


def test_a_class_that_is_formatted_unusually_is_read_as_well(somelib: Path) -> None:
    (somelib / "args.py").write_text(UNUSUAL)
    assert fields(CLASSES[1:]) == {"rate": float, "late": str}


def test_unknown_keys_and_values_of_the_wrong_type_are_named_and_others_are_left_to_the_library(somelib: Path) -> None:
    assert dict(problems("engine", {"rate": "1e-5", "names": ["a"], "kind": 7, "quoted": None})) == {}
    found = dict(problems("engine", {"rat": 1, "inherited": "one", "mode": "slower", "quoted": True}))
    assert found == {
        "rat": "unknown to somelib.Options; did you mean `rate`?",
        "inherited": "Input should be a valid integer, unable to parse string as an integer (got 'one'), says somelib.Options",
        "mode": "Input should be 'fast' or 'slow' (got 'slower'), says somelib.Options",
        "quoted": "expected a number, not a switch (got True), says somelib.Options",
    }


@pytest.mark.parametrize("change", ["no library", "no file", "no class"])
def test_what_cannot_be_read_is_not_judged(somelib: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "no library":
        monkeypatch.setattr("sys.path", [])
    elif change == "no file":
        (somelib / "args.py").unlink()
    else:
        (somelib / "args.py").write_text(SOURCE.replace("class Options", "class Arguments"))
    assert dict(problems("engine", {"rat": 1})) == {}
