"""A link and a scripted trainer over loopback."""

import hashlib

import pytest

from producer.interfaces import DownloadedPolicy, Probe
from producer.link.link import Link
from producer.link.mailbox import Mailbox
from producer.state import Counters, Identity, Workload
from protocol.config.sections.transport import TransportSection
from protocol.wire.messages import (
    Bye,
    Group,
    Lease,
    PolicyInfo,
)
from tests.loopback import LoopbackServer
from tests.scripted import facts, made_up_group
from tests.scripted_trainer import ScriptedTrainer, lease

TRANSPORT = TransportSection(heartbeat_interval_s=0.1, blob_chunk_bytes=1024, max_message_bytes=65_536)


def policy(version: int, blob: bytes = b"") -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(blob).hexdigest(), len(blob))


class Events:
    """Keeps what the link says."""

    def __init__(self) -> None:
        self.runs: list[PolicyInfo] = []
        self.sessions: list[PolicyInfo] = []
        self.leases: list[Lease] = []
        self.abandoned_ids: list[str] = []
        self.blobs: list[tuple[int, bytes]] = []
        self.probes: list[Probe | None] = []
        self.refusals: list[tuple[int, str]] = []
        self.fullness: list[bool] = []
        self.outcome: list[BaseException | None] = []
        self.fetches: list[tuple[int, bytes | None]] = []
        self.evaluations: list[PolicyInfo | None] = []

    def fetched(self, policy: PolicyInfo, downloaded: DownloadedPolicy | None) -> None:
        self.fetches.append((policy.version, downloaded and downloaded.blob))

    def evaluates(self, policy: PolicyInfo | None) -> None:
        self.evaluations.append(policy)

    def run_began(self, policy: PolicyInfo) -> None:
        self.runs.append(policy)

    def session_began(self, policy: PolicyInfo) -> None:
        self.sessions.append(policy)

    def leased(self, lease: Lease) -> None:
        self.leases.append(lease)

    def abandoned(self, lease_id: str) -> None:
        self.abandoned_ids.append(lease_id)

    def policy_arrived(self, downloaded: DownloadedPolicy) -> None:
        self.blobs.append((downloaded.policy.version, downloaded.blob))
        self.probes.append(downloaded.probe)

    def policy_refused(self, policy: PolicyInfo, reason: str) -> None:
        self.refusals.append((policy.version, reason))

    def outbox_full(self, full: bool) -> None:
        self.fullness.append(full)

    def ended(self, error: BaseException | None) -> None:
        self.outcome.append(error)


class Setup:
    def __init__(self, transport: TransportSection = TRANSPORT) -> None:
        self.server = LoopbackServer()
        self.client = self.server.connect("p")
        self.events = Events()
        self.counters = Counters()
        self.mailbox = Mailbox(self.client)
        self.link = Link(
            self.mailbox,
            Identity("p", facts(), 8, "merged"),
            transport,
            "loopback",
            self.events,
            self.counters,
            lambda: Workload((0, 0, 7), 2, 1, 1.5),
        )
        self.blob = bytes(range(256)) * 20
        self.trainer = ScriptedTrainer(self.server, policy(0, self.blob))
        self.trainer.blobs[self.trainer.policy.digest] = self.blob

    def start(self) -> "Setup":
        self.trainer.start()
        self.link.start()
        return self

    def wait_for(self, condition, timeout_s=10.0):
        self.trainer.wait_for(condition, timeout_s)

    def take_leases(self, *numbers: int) -> None:
        before = len(self.events.leases)
        for number in numbers:
            self.trainer.send(lease(number))
        self.wait_for(lambda: len(self.events.leases) == before + len(numbers))

    def finish(self, number: int) -> None:
        self.mailbox.answer(made_up_group(lease(number), 0))

    def groups(self) -> list[str]:
        return [group.lease_id for group in self.trainer.all(Group)]

    def restart_trainer(self, newest: PolicyInfo, blob: bytes) -> None:
        """Another process, which knows nothing of the connection."""
        self.trainer.session += "+"
        self.trainer.policy = newest
        self.trainer.blobs[newest.digest] = blob
        self.trainer.send(Bye("unknown_session"))

    def end(self) -> None:
        self.link.stop(0.0)
        self.link.join(5)
        assert not self.link.is_alive()
        if self.trainer._thread.is_alive():
            self.trainer.stop()


IMPATIENT = pytest.mark.parametrize("setup", [{"heartbeat_timeout_s": 0.5}], ids=["impatient"], indirect=True)
"""Where silence is to be noticed; elsewhere a busy machine may take its time."""
