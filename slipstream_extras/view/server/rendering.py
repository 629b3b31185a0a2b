"""Pages from templates, and the same pages as one file to share.

Guarantee: every value is escaped by the template engine. A shared page needs nothing beside itself: styles and scripts are in
it, a policy in its head allows these and nothing else, and its links lead nowhere.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from slipstream.tables import clock, duration, number, percent, printable, rate, size, span

FOLDER = Path(__file__).parents[1]
STATIC = FOLDER / "static"
_SCRIPTS = ("vendor/uplot/uPlot.iife.min.js", "charts.js", "keys.js")
_STYLES = ("vendor/uplot/uPlot.min.css", "view.css")


@cache
def _environment() -> Environment:
    result = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    result.filters |= {
        "clock": clock, "number": number, "size": size, "percent": percent, "duration": duration, "rate": rate,
        "printable": lambda text: printable(str(text)),
    }  # fmt: skip
    result.globals |= {"span": span, "scripts": _SCRIPTS, "styles": _STYLES}
    return result


def fragment(template: str, **values: Any) -> HTMLResponse:
    """A part of a page."""
    return HTMLResponse(_environment().get_template(template).render(**values))


def page(request: Request, template: str, run: str, status: int = 200, **values: Any) -> HTMLResponse:
    """The page; with `?share=1` as a file to keep."""
    shared = request.query_params.get("share") == "1"
    query = [(name, value) for name, value in parse_qsl(request.url.query) if name != "share"]
    known = {
        "run": run,
        "path": request.url.path,
        "share_link": f"{request.url.path}?{urlencode([*query, ('share', '1')])}",
        "shared": _inlined() if shared else None,
    }
    text = _environment().get_template(template).render(**known, **values)
    if not shared:
        return HTMLResponse(text, status)
    name = re.sub(r"[^A-Za-z0-9-]+", "-", f"{run}{request.url.path}").strip("-") or "run"
    # In an escaped text no quotation mark is left, so this finds attributes only.
    return HTMLResponse(
        re.sub(r' (?:href|action)="/[^"]*"', "", text),
        status,
        {"content-disposition": f'attachment; filename="{name}.html"'},
    )


@cache
def _inlined() -> dict[str, Any]:
    """The text of scripts and styles, and the policy that allows these alone."""
    scripts, styles = ([(STATIC / name).read_text(encoding="utf-8") for name in names] for names in (_SCRIPTS, _STYLES))
    allowed = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in texts)
        for kind, texts in (("script-src", scripts), ("style-src", styles))
    }
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    return {
        "scripts": scripts,
        "styles": styles,
        "policy": "; ".join([policy, *(f"{kind} {hashes}" for kind, hashes in allowed.items())]),
    }


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
