import pytest

from tests.unit.test_house import owners_of_packages


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the packages of this Python once, because that reads files of all of them."""
    monkeypatch.setattr("slipstream_extras.bundle.bundle.packages_distributions", owners_of_packages)
