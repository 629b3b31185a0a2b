import pytest

from tests.unit.test_house import owners_of_packages


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this Python are found once: that reads the files of all of them."""
    monkeypatch.setattr("protocol.bundle.bundle.packages_distributions", owners_of_packages)
