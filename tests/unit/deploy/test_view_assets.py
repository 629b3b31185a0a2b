"""The libraries that browsers get are those that were pinned."""

import hashlib

from deploy.view.fetch_assets import ASSETS, FOLDER


def test_the_files_are_the_pinned_ones_and_nothing_else_is_there() -> None:
    expected = {
        FOLDER / asset.folder / path.rpartition("/")[2]: digest
        for asset in ASSETS
        for path, digest in asset.files.items()
    }
    found = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == expected
    assert all(any("LICENSE" in path for path in asset.files) for asset in ASSETS)
