"""A trainer's door under strangers of every kind, for some seconds; the long form is `campaigns.fuzz.strangers`."""

from pathlib import Path

import pytest

from campaigns.fuzz.strangers import COMBINATIONS, campaign
from campaigns.fuzz.zmtp import Scripts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("transport", "with_keys"), COMBINATIONS)
def test_strangers_end_no_thread_leave_nothing_behind_and_cost_no_group(
    tmp_path: Path, transport: str, with_keys: bool
) -> None:
    report = campaign(transport, with_keys, 3.0, 1, tmp_path)
    print(report.summary)
    assert report.connections.total() > 0
    assert report.frames > 0
    assert sum(report.refused.values()) > 0


def test_a_connection_can_be_made_again_by_its_number() -> None:
    scripts = [Scripts(seed, (b"live",)).script(number) for seed in (1, 1, 2) for number in (3, 4)]
    assert scripts[:2] == scripts[2:4]
    assert scripts[0] != scripts[1]
    assert scripts[:2] != scripts[4:]
