"""Plugins of this checkout, for tests and for the processes that they start.

An editable installation keeps the entry points of the day when it was made. Where pyproject.toml has others by now, these are
written into a folder that comes first on the paths of this process and of its children.
"""

import os
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def use_entry_points_of_checkout() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    installed = distribution(project["name"])
    if groups == _groups(installed.entry_points):
        return
    folder = ROOT / "build" / "entry_points"
    install(folder, project["name"], groups, installed.version)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def _groups(entries: Any) -> dict[str, dict[str, str]]:
    return {group: {entry.name: entry.value for entry in entries.select(group=group)} for group in entries.groups}


def install(folder: Path, name: str, groups: dict[str, dict[str, str]], version: str = "1.0") -> None:
    """Write into `folder` what an installed package has for importlib.metadata. Other processes may be reading it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    _write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups.items()
    ]
    _write(info / "entry_points.txt", "\n".join(lines))


def _write(file: Path, text: str) -> None:
    written = file.with_name(f".{file.name}.{os.getpid()}")
    written.write_text(text)
    written.replace(file)
