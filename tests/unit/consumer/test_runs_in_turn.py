"""Two runs in turn under one producer: the trainer of the first is stopped, and one of another run comes to its endpoint.

The real intakes and the real link, over sockets.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from protocol.wire.messages import Lease
from replay.journal.disk import DiskGuard
from tests.scripted import made_up_group
from tests.unit.consumer.builders import FillableJournal, live_buffer
from tests.unit.consumer.intake.builders import SHAPE
from tests.unit.consumer.test_rolling_upgrade import Endpoints, Site, Worker, until


class SlowWorker(Worker):
    """Answers `num_answers` leases and works for ever on the others."""

    num_answers = 40

    def __init__(self, endpoints: Endpoints) -> None:
        self.leases: list[Lease] = []
        super().__init__(endpoints)

    def leased(self, lease: Lease) -> None:
        self.leases.append(lease)
        if len(self.leases) <= self.num_answers:
            self.mailbox.put(made_up_group(lease, 0))


@pytest.fixture
def site(short_dir: Path, journal: FillableJournal, disk: DiskGuard) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(short_dir, journal, disk, stack)


@pytest.mark.parametrize("goes_on", [True, False], ids=["the same run", "another run"])
def test_a_trainer_adopts_the_leases_of_its_own_run_alone(site: Site, tmp_path: Path, goes_on: bool) -> None:
    first = site.trainer(live_buffer(site.journal, groups_per_step=64))
    worker = site.stack.enter_context(closing(SlowWorker(site.endpoints)))
    until(lambda: first.replay.totals["accepted"] == 40 and len(worker.leases) == 48)
    held = {lease.lease_id for lease in worker.leases[40:]}
    first.intake.stop("stopping")

    journal = site.journal if goes_on else site.stack.enter_context(closing(FillableJournal(tmp_path / "other.sqlite")))
    replay = live_buffer(journal, groups_per_step=64, session="t")
    replay.restore(None, step=0, shape=SHAPE)
    second = site.trainer(replay, run_id="run" if goes_on else "another run", resumed=goes_on)
    until(lambda: replay.depth()["leased"] == 8)
    assert replay.leased_to("new") == (held if goes_on else {f"0-{number}-0-1-t" for number in range(8)})
    assert replay.totals["adopted"] == (8 if goes_on else 0)
    assert replay.state()["ledger"]["position"] == (48 if goes_on else 8), "the cursor is where this run left it"
    second.errors.check()
    assert worker.outcome == []
