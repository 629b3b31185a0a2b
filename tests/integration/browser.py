"""A real browser, Debian's chromium, and the command `slipstream view` as it runs for people.

Guarantee: both end with their context. What the browser wrote to its console can be read.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.tools import require

_PATIENCE_S = 60.0
_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1000",
    "--disable-background-networking", "--no-first-run",
)  # fmt: skip


@contextmanager
def browser(downloads: Path) -> Iterator[Any]:
    """A WebDriver; skips where there is no chromium."""
    require("chromium", "chromium")
    require("chromedriver", "chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for switch in _SWITCHES:
        options.add_argument(switch)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(_PATIENCE_S)
        yield driver
    finally:
        driver.quit()


@contextmanager
def viewed(run: Path, cache: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`slipstream view --run RUN`: the URL that it prints, and the process, which ends with 0."""
    command = [sys.executable, "-m", "slipstream", "view", "--run", str(run)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http\S+", process.stdout.readline())
            assert found is not None
            yield found[0], process
        finally:
            process.terminate()
            assert process.wait(_PATIENCE_S) == 0


def until(condition: Callable[[], Any], what: str, patience_s: float = _PATIENCE_S) -> Any:
    """What the condition returns, as soon as it is true."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen")


def texts(driver: Any, selector: str) -> list[str]:
    """In one look: a live page replaces its elements."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText.trim())", selector
    )


def drawn(driver: Any) -> list[str]:
    """The charts of the page, as images."""
    return driver.execute_script(
        "return [...document.querySelectorAll('#charts canvas')].map((one) => one.toDataURL())"
    )


def console(driver: Any) -> list[str]:
    """What was written to the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
