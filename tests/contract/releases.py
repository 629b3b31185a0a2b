"""The contract with vLLM over the wheels of every release in the declared range, one line for each.

    python -m tests.contract.releases               # those that pip finds within the range of pyproject.toml
    python -m tests.contract.releases 0.34.0        # these, to see what a wider range would meet

Guarantee: a wheel is downloaded by pip into a folder that is removed again, and nothing of it is run.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("releases", nargs="*", help="releases of vLLM; left out: those in the declared range")
    releases = parser.parse_args().releases or declared_releases()
    results = {release: holds(release) for release in releases}
    for release, result in results.items():
        print(f"vllm {release}: {'holds' if result else 'broken (see above)'}")
    return 0 if results and all(results.values()) else 1


def declared_releases() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [requirement] = [
        found for found in map(Requirement, project["optional-dependencies"]["gpu"]) if found.name == "vllm"
    ]
    said = pip("index", "versions", "vllm")
    known = re.search(r"Available versions: (.*)", said)
    return sorted(requirement.specifier.filter(known[1].split(", "))) if known else []


def holds(release: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as folder:
        pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={release}")
        [wheel] = Path(folder).glob("*.whl")
        sources = Path(folder, "sources")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sources, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
        environment = os.environ | {"SLIPSTREAM_VLLM_SOURCES": str(sources)}
        command = [sys.executable, "-m", "pytest", "-q", "tests/contract/test_vllm.py"]
        return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode == 0


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
