"""Fetches the browser libraries of `slipstream view` from npm, into the package that serves them.

    python -m deploy.view.fetch_assets

Guarantee: exactly these files of exactly these releases: npm's integrity of the package and the sha256 of each file are compared.
They are committed, with their licences, so that nothing is fetched to build, install or run.
"""

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "slipstream/view/static/vendor"


class Asset(NamedTuple):
    package: str  # NAME@VERSION
    integrity: str  # as npm has it
    folder: str
    files: dict[str, str]  # sha256 by path in the package


ASSETS = (
    Asset(
        "uplot@1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        "uplot",
        {
            "dist/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
            "dist/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
            "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        },
    ),
)


def fetch(asset: Asset) -> None:
    """Writes the files of one package; `ValueError` if one is not what it was."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", asset.package, "--json", "--pack-destination", folder]
        (packed,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
        if packed["integrity"] != asset.integrity:
            raise ValueError(f"{asset.package} has the integrity {packed['integrity']}, expected {asset.integrity}")
        data = (Path(folder) / packed["filename"]).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for path, digest in asset.files.items():
            member = archive.extractfile(f"package/{path}")
            content = member.read() if member else b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError(f"{path} of {asset.package} is another file than before")
            place = FOLDER / asset.folder / Path(path).name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


if __name__ == "__main__":
    for each in ASSETS:
        fetch(each)
