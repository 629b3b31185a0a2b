"""Fields read from the source of a package that nothing imports."""

import sys
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args

import pytest

from protocol.config.library_fields import ANY, UNKNOWN, LibraryField, fields_of_class

BASE = '''
import enum
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional, TYPE_CHECKING
from typing_extensions import NoSuchName
from .kinds import Kind as Sort, Alias
if TYPE_CHECKING:
    from nowhere import Later

class Config:
    limit: int = 7

@dataclass
class Base:
    """A base.

    Parameters:
        scale (`str` or `bool`, *optional*, defaults to `"group"`):
            Both are taken.
    """

    inherited: float = 0.5
    scale: str = "group"
    made: int = field(init=False, default=3)
    shared: ClassVar[int] = 1

@dataclass
class Options(Base):
    sort: Sort = Sort.FAST
    alias: Alias = "a"
    limit: int = Config.limit
    maybe: Optional[int] = None
    later: "Later | None" = None
    odd: NoSuchName = 1
    negative: int = -1
    table: dict[str, int] = field(default_factory=dict)
    inherited: int = 2
raise SystemExit("nothing imports this")
'''
KINDS = """
import enum
from typing import Literal
class Kind(enum.Enum):
    FAST = "f"
    SLOW = "s"
Alias = Literal["a", "b"] | None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"library_{tmp_path.name.replace('-', '_')}"  # what was read of a module is kept
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .base import Options\n")
    (tmp_path / name / "base.py").write_text(BASE)
    (tmp_path / name / "kinds.py").write_text(KINDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_hints_and_defaults_come_from_the_source_alone(package: str) -> None:
    found = fields_of_class(package, "Options")
    assert found is not None
    assert package not in sys.modules
    sort, alias, table = found.pop("sort"), found.pop("alias"), found.pop("table")
    assert found == {
        "inherited": LibraryField(int, 2),
        "scale": LibraryField(Union[str, bool], "group"),  # noqa: UP007 - as it is made
        "limit": LibraryField(int, 7),
        "maybe": LibraryField(Optional[int], None),  # noqa: UP045
        "later": LibraryField(Any, None),
        "odd": LibraryField(Any, 1),
        "negative": LibraryField(int, -1),
    }
    assert [member.value for member in sort.hint] == ["f", "s"]
    assert get_args(alias.hint) == (Literal["a", "b"], type(None))
    assert (table.hint, table.default) == (dict[str, int], UNKNOWN)


@pytest.mark.parametrize(("module", "name"), [("", "Absent"), (".absent", "Options"), (".kinds", "Alias")])
def test_what_is_not_found_has_no_fields(package: str, module: str, name: str) -> None:
    assert fields_of_class(package + module, name) is None
    assert fields_of_class("no_such_library.config", "Options") is None
    assert ANY.hint is Any
