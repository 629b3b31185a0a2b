"""Takes the pictures of `slipstream view` in docs/images, of a run that is there.

    make demo && python docs/generate_view_pictures.py --run runs/demo

With `--live` it takes none, and fails unless the page of a run that goes on (`make demo` beside it) changes by itself.

Guarantee: they are what chromium shows of the command's pages. They differ with every run, so nothing compares them.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.browser import browser, console, drawn, until, viewed

_MIXED = "/groups?state=trained&verdict=mixed&sort=step&order=ascending"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="of which they are (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    parser.add_argument("--live", action="store_true", help="only see whether the page of a run that goes on changes")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as driver,
        viewed(chosen.run, Path(folder)) as found,
    ):
        url, _ = found
        base = url.partition("/?")[0]
        driver.get(url)
        if chosen.live:
            see_it_change(driver)
            return

        def is_whole() -> bool:
            driver.get(f"{base}{_MIXED}&truncated=no")
            return "The index is being built" not in driver.page_source

        until(is_whole, "the index")
        driver.get(base)
        until(lambda: driver.find_elements("css selector", "#numbers .facts"), "the charts")
        driver.save_screenshot(str(chosen.out / "view-run.png"))
        driver.get(f"{base}{_MIXED}")
        group = driver.find_element("css selector", "table.groups a").text
        driver.get(f"{base}/group?{urlencode({'id': group})}")
        driver.save_screenshot(str(chosen.out / "view-group.png"))


def see_it_change(driver: Any) -> None:
    """Steps and charts follow the trainer, and nothing is written to the console."""

    def step() -> str:
        return driver.execute_script("return document.getElementById('now')?.textContent ?? ''")

    first, before = until(step, "the step"), until(lambda: drawn(driver), "the charts")
    until(lambda: step() not in ("", first), "a later step")
    until(lambda: drawn(driver) != before, "a later point")
    if messages := console(driver):
        raise SystemExit(f"the browser says {messages}")
    sys.stdout.write(f"the page went from {first!r} to {step()!r}\n")


if __name__ == "__main__":
    main()
