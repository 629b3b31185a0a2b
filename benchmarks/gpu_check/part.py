"""One part of the check, in a process of its own: `python -m benchmarks.gpu_check.part NAME GPU SHARED FOLDER FINDINGS`.

Guarantee: a line of JSON per finding is in the file FINDINGS as soon as it is known, and why the part did not end well in the
last.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.place import NotRunError, Place
from benchmarks.gpu_check.plan import ARMS, PLAN
from protocol.command_line import leave
from protocol.gpu.nvml import select_gpus
from protocol.runtime.json_lines import encode_line


def main(name: str, gpu: str, shared: str, folder: str, findings: str) -> int:
    place = Place(tuple(select_gpus(gpu)), Path(shared), Path(folder))
    [part] = [part for part in (*PLAN, *ARMS) if part.name == name]
    with open(findings, "a", encoding="utf-8", buffering=1) as file:

        def note(line: dict[str, Any]) -> None:
            file.write(encode_line(line) + "\n")

        try:
            for finding in importlib.import_module(f"benchmarks.gpu_check.{part.module}").run(place, **part.options):
                note(finding)
                print(finding, flush=True)
        except NotRunError as error:
            note({"not_run": str(error)})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            note({"failed": f"{type(error).__name__}: {error}"})
            return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    leave(main(*sys.argv[1:]))
