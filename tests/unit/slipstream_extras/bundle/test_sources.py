"""The files that functions need are found by reading them, and none outside of the folder."""

import ast
from pathlib import Path

import pytest

from protocol.errors import BundleError
from slipstream_extras.bundle import sources
from slipstream_extras.bundle.sources import RunSources, imports_of

KEY = "rewards.functions.0"


def write(folder: Path, **files: str) -> RunSources:
    """`_0_` in a name is `/`, and `package` as its last part `__init__`."""
    for name, text in files.items():
        place = folder / f"{name.replace('_0_', '/').replace('/package', '/__init__')}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return RunSources(folder.resolve())


def found(text: str, package: str = "") -> dict[str, bool]:
    return dict(imports_of(ast.parse(text), package))


def test_every_import_statement_is_found_with_whether_it_is_needed() -> None:
    text = """
import a, b.c as d
from e import f, g
from . import h
from ..i import j
from k import *
def function():
    with open("x"):
        import l
class Class:
    match 1:
        case 1:
            import m
try:
    import n
except (ImportError, OSError):
    import o
else:
    import p
finally:
    import q
try:
    import r
except OSError:
    pass
try:
    import s
except* ValueError:
    import t
try:
    import u
except:
    pass
if TYPE_CHECKING:
    import v
else:
    import w
if typing.TYPE_CHECKING:
    import x
if True:
    for _ in []:
        import y
    else:
        import z
"""
    needed = {"a", "b.c", "e", "top.inner", "top.i", "k", "l", "m", "o", "p", "q", "r", "s", "t", "w", "y", "z"}
    maybe = {"e.f", "e.g", "top.inner.h", "top.i.j", "n", "u"}
    assert found(text, "top.inner") == dict.fromkeys(needed, True) | dict.fromkeys(maybe, False)


def test_a_function_brings_its_file_and_what_that_imports_from_the_folder(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        rewards="import helper\nfrom lib.score import exact\nfrom lib import extra\nimport json, numpy.linalg\n",
        helper="import rewards  # a circle\nimport lonely_package\n",
        lib_0_package="from . import tables\n",
        lib_0_score="from .tables import WORDS\nfrom ..helper import x\n",
        lib_0_tables="",
        lib_0_extra="",
        lib_0_unused="",
        unused="",
        spaces_0_deep_0_inner="import torch\n",
    )
    assert run.add_function("rewards.py:exact", KEY) == "rewards.py:exact"
    expected = {"rewards.py", "helper.py", "lib/__init__.py", "lib/score.py", "lib/tables.py", "lib/extra.py"}
    assert set(run.files) == expected
    assert run.files["helper.py"] == b"import rewards  # a circle\nimport lonely_package\n"
    assert run.installed == {"numpy": "rewards.py", "lonely_package": "helper.py"}
    assert run.add_function("spaces.deep.inner:f", KEY) == "spaces.deep.inner:f", "a folder without __init__.py"
    assert set(run.files) == expected | {"spaces/deep/inner.py"}


def test_a_module_of_an_installed_package_is_a_requirement_and_ours_are_none(tmp_path: Path) -> None:
    run = write(tmp_path, producer_0_package="", producer_0_mine="", data_0_other="")
    assert run.add_function("somewhere.rewards:exact", KEY) == "somewhere.rewards:exact"
    assert run.add_function("math:sqrt", KEY) == "math:sqrt"
    assert run.add_function("producer.mine:exact", KEY) == "producer.mine:exact"
    assert not run.add_module("data"), "a folder without Python of that name"
    assert run.installed == {"somewhere": KEY}
    assert run.files == {}


def test_an_absolute_name_becomes_relative_to_the_folder(tmp_path: Path) -> None:
    run = write(tmp_path, inner_0_rewards="")
    assert run.add_function(f"{tmp_path}/inner/rewards.py:exact", KEY) == "inner/rewards.py:exact"
    assert run.add_function("inner/../inner/rewards.py:exact", KEY) == "inner/rewards.py:exact"


def test_a_file_elsewhere_is_refused_also_through_links(tmp_path: Path) -> None:
    write(tmp_path, outside="SECRET = 1\n")
    run = write(tmp_path / "run", rewards="import linked\n", fine="import inner\n", inner="")
    (tmp_path / "run" / "linked.py").symlink_to(tmp_path / "outside.py")
    (tmp_path / "run" / "package").symlink_to(tmp_path)
    (tmp_path / "run" / "alias.py").symlink_to("inner.py")
    for spec in ("../outside.py:f", f"{tmp_path}/outside.py:f", "linked.py:f"):
        with pytest.raises(BundleError, match=rf"{KEY}: {tmp_path}/outside.py is not below {tmp_path}/run"):
            run.add_function(spec, KEY)
    for spec in ("rewards.py:f", "package.outside:f"):
        with pytest.raises(BundleError, match=r"is a link to .*/outside.py, outside of the run's folder"):
            run.add_function(spec, KEY)
    assert b"SECRET = 1\n" not in run.files.values()
    assert run.add_module("alias"), "a link inside is the file that it names"
    assert run.files["alias.py"] == b""


def test_what_cannot_be_read_as_python_is_refused_with_its_place(tmp_path: Path) -> None:
    run = write(tmp_path, broken="def f(:\n", rewards="import broken\n")
    with pytest.raises(BundleError, match=r"broken.py is not valid Python: .*line 1"):
        run.add_function("rewards.py:f", KEY)
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "deep.py").write_text("x = " + "(" * 10_000 + "\n")
    for name in ("bytes", "deep"):
        with pytest.raises(BundleError, match="not valid Python"):
            run.add_function(f"{name}.py:f", KEY)
    with pytest.raises(BundleError, match=f"{KEY}: gone.py:f: there is no file gone.py in"):
        run.add_function("gone.py:f", KEY)


@pytest.mark.long
def test_long_chains_are_followed_and_end_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path, **{f"m{number}": f"import m{number + 1}\n" for number in range(900)}, m900="")
    run.add_function("m0.py:f", KEY)
    assert len(run.files) == 901
    monkeypatch.setattr(sources, "MOST_FILES", 11)
    with pytest.raises(BundleError, match="import more than 10 files of"):
        RunSources(tmp_path.resolve()).add_function("m0.py:f", KEY)


def test_a_file_that_is_larger_than_a_bundle_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path, rewards="x = 1\n" * 100)
    monkeypatch.setattr("slipstream_extras.bundle.bundle.LARGEST_BUNDLE_BYTES", 64)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE_BYTES", 64)
    with pytest.raises(BundleError, match="has 65 bytes, and 64 are allowed"):
        run.add_function("rewards.py:f", KEY)
