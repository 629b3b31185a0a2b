"""A link and a scripted trainer over loopback."""

import hashlib
from collections import defaultdict
from typing import Any

from producer.link.events import LinkEvent, PolicyArrived, PolicyFetched
from producer.link.session import Link, Mailbox
from producer.metrics import Counters, Workload
from protocol.config.operation import TransportSection
from protocol.wire.messages import Bye, Group, Hello, Lease, PolicyInfo
from slipstream_extras.relays.sources import PolicySources
from tests.loopback import LoopbackServer
from tests.scripted import facts, made_up_group
from tests.scripted_trainer import ScriptedTrainer, lease

TRANSPORT = TransportSection(heartbeat_interval_s=0.1, blob_chunk_bytes=1024, max_message_bytes=65_536)


def policy(version: int, blob: bytes = b"") -> PolicyInfo:
    return PolicyInfo(version, hashlib.sha256(blob).hexdigest(), len(blob))


class Events:
    """Keeps the events of the link: of each kind what it says, in order."""

    def __init__(self) -> None:
        self._told: defaultdict[type, list[Any]] = defaultdict(list)

    def __call__(self, event: LinkEvent) -> None:
        told = event if isinstance(event, Lease) or len(event) > 1 else event[0]
        self._told[type(event)].append(told)

    def of(self, kind: type) -> list[Any]:
        return self._told[kind]

    @property
    def blobs(self) -> list[tuple[int, bytes]]:
        return [(downloaded.policy.version, bytes(downloaded.blob)) for downloaded in self.of(PolicyArrived)]

    @property
    def fetches(self) -> list[tuple[int, bytes | None]]:
        return [
            (policy.version, downloaded and bytes(downloaded.blob)) for policy, downloaded in self.of(PolicyFetched)
        ]


class Setup:
    def __init__(self, transport: TransportSection = TRANSPORT) -> None:
        self.server = LoopbackServer()
        self.client = self.server.connect("p")
        self.events = Events()
        self.counters = Counters()
        self.mailbox = Mailbox(self.client)
        self.link = Link(
            self.mailbox,
            Hello("p", facts(), 8, swap_mode="merged"),
            transport,
            PolicySources("p", transport),
            self.events,
            self.counters,
            lambda: Workload((0, 0, 7), 2, 1, 1.5),
        )
        self.blob = bytes(range(256)) * 20
        self.trainer = ScriptedTrainer(self.server, policy(0, self.blob), heartbeat_s=0.02)
        self.trainer.blobs[self.trainer.policy.digest] = self.blob

    def start(self) -> None:
        """Until the trainer has been greeted."""
        self.trainer.start()
        self.link.start()
        self.trainer.wait_for_message(Hello)

    def wait_for(self, condition, timeout_s=10.0):
        self.trainer.wait_for(condition, timeout_s)

    def take_leases(self, *numbers: int) -> None:
        before = len(self.events.of(Lease))
        for number in numbers:
            self.trainer.send(lease(number))
        self.wait_for(lambda: len(self.events.of(Lease)) == before + len(numbers))

    def finish(self, number: int) -> None:
        self.mailbox.put(made_up_group(lease(number), 0))

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
