"""Writes deploy/grafana/dashboards/*.json from the modules beside it.

Guarantee: equal code gives equal files; `--check` exits with 1 when a file is out of date or belongs to no dashboard. Run it as
`python -m deploy.grafana.generate`.
"""

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.engine import engine
from deploy.grafana.fleet import fleet
from deploy.grafana.learning import learning
from deploy.grafana.pipeline import pipeline

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {"learning": learning, "pipeline": pipeline, "producer-engine": engine, "fleet": fleet}


def documents() -> dict[str, str]:
    """File names and contents."""
    return {f"{name}.json": _document(make().build()) for name, make in DASHBOARDS.items()}


def _document(board: Dashboard) -> str:
    content = json.loads(json.dumps(board, cls=JSONEncoder))
    for variable in content["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):  # of intervals, but the SDK writes them for every variable
            variable.pop(key, None)
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    arguments = parser.parse_args()
    wanted = documents()
    if not arguments.check:
        FOLDER.mkdir(exist_ok=True)
        for name, text in wanted.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    elif wanted != {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json")}:
        sys.exit("deploy/grafana/dashboards is out of date; run: make docs")


if __name__ == "__main__":
    main()
