"""Programs that some tests need and not every machine has."""

import os
import shutil

import pytest


def require(tool: str, package: str) -> None:
    """Skips the test where the program is missing; fails it in CI, where it may not be."""
    if shutil.which(tool) is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f"this machine has no {tool} (package {package})"
        )
