"""Draws docs/images/rl-status.svg: what `rl-status` shows of the daemons whose documents are in docs/images/rl-status.json.

Guarantee: the picture is the view of this release, the same on every machine; `--check` exits with 1 when it is out of date. Run
it as `python docs/generate_status_picture.py`.
"""

import io
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from protocol.runtime.metrics import Status
from slipstream.run_reader import DaemonAddress
from slipstream.status.daemons import Answer
from slipstream.status.reading import read
from slipstream.status.render import render
from slipstream.status.warnings import warnings

PICTURE = ROOT / "docs" / "images" / "rl-status.svg"
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g class="{unique_id}-matrix" transform="translate({terminal_x}, {terminal_y})">{backgrounds}{matrix}</g>
</svg>
"""


def picture() -> str:
    """The file has two looks at both daemons, and the reward of each step."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    written = PICTURE.with_suffix(".json").read_bytes()
    documents, rewards = msgspec.json.decode(written, type=tuple[list[list[Status]], list[float]])
    looks = [[Answer(DaemonAddress(said.daemon, said.job), said.at, said) for said in look] for look in documents]
    view = msgspec.structs.replace(read(looks), rewards=dict(enumerate(rewards, 1)))
    console = Console(
        record=True, file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor", _environ={}
    )
    console.print(render(view, warnings(view), console.width))
    return console.export_svg(title="rl-status --run runs/demo", code_format=FORMAT, unique_id="rl-status")


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PICTURE.write_text(picture(), encoding="utf-8")
    elif picture() != PICTURE.read_text(encoding="utf-8"):
        sys.exit("docs/images/rl-status.svg is out of date: run `python docs/generate_status_picture.py`")
