"""User functions are found by module or file, and every reason why not is told with its key."""

import sys
from pathlib import Path

import pytest

from protocol.config.functions import installed_plugin, load_function, load_plugin
from protocol.errors import ConfigError

KEY = "rewards.functions"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_from_a_file_and_from_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "one.py").write_text("def reward(x):\n    return x + 1\n")
    (folder / "my_rewards_package").mkdir()
    (folder / "my_rewards_package" / "two.py").write_text("def reward(x):\n    return x + 2\n")
    assert load_function("one.py:reward", KEY)(1) == 2
    assert load_function(f"{folder}/one.py:reward", KEY)(1) == 2
    assert load_function("my_rewards_package.two:reward", KEY)(1) == 3
    assert load_function("math:sqrt", KEY)(9) == 3.0


def test_functions_of_one_file_share_it_and_files_of_one_name_do_not(folder: Path) -> None:
    text = "calls = []\ndef first(x):\n    calls.append(x)\n    return calls\ndef second(x):\n    return first(x)\n"
    (folder / "one.py").write_text(text)
    (folder / "other").mkdir()
    (folder / "other" / "one.py").write_text(text)
    assert load_function("one.py:first", KEY)(1) == [1]
    assert load_function("other/one.py:first", KEY)(2) == [2]
    assert load_function(f"{folder}/one.py:second", KEY)(3) == [1, 3]


def test_a_file_may_define_dataclasses(folder: Path) -> None:
    """Dataclasses look their module up in sys.modules while they are made."""
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Score:\n    value: float\n"
    (folder / "scores.py").write_text(text)
    assert load_function("scores.py:Score", KEY)(2.0).value == 2.0


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("", "absent.py:f", "absent.py:f: there is no file absent.py (looked from {folder})"),
        ("", "no_such_module:f", "no_such_module:f: importing no_such_module failed: ModuleNotFoundError: No module named "
         "'no_such_module'"),
        ("", "user.py:f", "user.py:f: user.py has no `f`"),
        (
            "",
            "slipstream:f",
            "slipstream:f: slipstream has no `f`; it is a package of Slipstream, so write slipstream.py:f, or rename yours",
        ),
        ("f = 3", "user.py:f", "user.py:f: `f` is not a function but int"),
        ("1 / 0", "user.py:f", "user.py:f: importing user.py failed: ZeroDivisionError: division by zero"),
        ("import absent_helper", "user.py:f", "user.py:f: importing user.py failed: ModuleNotFoundError: No module named "
         "'absent_helper'"),
        ("def f(:", "user.py:f", "user.py:f: importing user.py failed: SyntaxError: invalid syntax (user.py, line 1)"),
        ("open('absent.txt')", "user.py:f", "user.py:f: importing user.py failed: FileNotFoundError: [Errno 2] No such file "
         "or directory: 'absent.txt'"),
    ],
)  # fmt: skip
def test_why_not(folder: Path, text: str, spec: str, message: str) -> None:
    (folder / "user.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_function(spec, KEY)
    assert str(caught.value) == f"{KEY}: {message.format(folder=folder)}"


def test_a_plugin_is_found_by_the_name_of_its_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[slipstream.testing]\nroot = math:sqrt\nbroken = no_such_module:x\n")
    monkeypatch.syspath_prepend(folder)
    assert load_plugin("slipstream.testing", "root", KEY)(9) == 3.0
    with pytest.raises(ConfigError, match=rf"{KEY}.*`cube`.*broken, root.*install"):
        load_plugin("slipstream.testing", "cube", KEY)
    with pytest.raises(ConfigError, match=rf"{KEY}: broken: importing no_such_module:x failed: ModuleNotFoundError"):
        load_plugin("slipstream.testing", "broken", KEY)
    with pytest.raises(ConfigError, match="it has none"):
        load_plugin("slipstream.nothing", "root", KEY)
    assert installed_plugin("slipstream.testing", "root")(9) == 3.0
    assert [installed_plugin("slipstream.testing", name) for name in ("cube", "broken")] == [None, None]
