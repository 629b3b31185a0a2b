"""The files as templates with blanks.

Guarantee: a blank that nobody fills is an error, and what is filled into a script is one word of the shell, whatever it holds.
"""

import json
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from protocol.errors import ExitCode
from slipstream.cluster.fleet.exits import STAYS_DOWN


def _environment() -> Environment:
    environment = Environment(  # noqa: S701  no HTML
        loader=PackageLoader("slipstream.cluster.render"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["word"] = lambda value: shlex.quote(str(value))
    environment.filters["yaml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    environment.filters["unit"] = _unit_word
    environment.globals["stays_down"] = sorted(int(code) for code in STAYS_DOWN if code is not ExitCode.OK)
    return environment


def _unit_word(value: str) -> str:
    """As a unit of systemd takes it in ExecStart."""
    return json.dumps(value, ensure_ascii=False).replace("%", "%%").replace("$", "$$")


def fill(template: str, **values: Any) -> bytes:
    """The content of a template, in UTF-8, such as `slurm/trainer.sbatch`."""
    return _environment().get_template(f"{template}.j2").render(values).encode()
