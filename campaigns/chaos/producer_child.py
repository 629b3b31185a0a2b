"""`rl-producer`, watched: the real command around a stand-in for vLLM, with its evidence written down and points to die
at.

Guarantee: every acknowledgement that reaches this process is on the disk before the producer can forget the group. No two
groups have equal tokens, so that digests tell them apart.
"""

import importlib
from pathlib import Path
from typing import Any, NoReturn

from campaigns.chaos.aims import Aim
from campaigns.chaos.evidence import EvidenceLog, digest_of_message
from tests import scripted_engine

_USED = ("producer.app.daemon", "producer.app.cli", "campaigns.chaos.patched_engine")


def preload() -> None:
    for name in _USED:
        importlib.import_module(name)
    from transformers import AutoTokenizer

    assert AutoTokenizer


def main(request: dict[str, Any]) -> NoReturn:
    log = EvidenceLog(Path(request["evidence"]))
    aim = Aim(*request.get("aim", ()))
    if request.get("full"):
        from campaigns.chaos import patched_engine

        scripted_engine.put_in_place(patched_engine.install(aim, log.note))
    else:
        scripted_engine.install(reach=aim.reach)
    _watch(log, aim)
    from producer.app import cli

    log.note("process", argv=request["argv"])
    cli.main()


def _watch(log: EvidenceLog, aim: Aim) -> None:
    from producer.link.session import Link, Mailbox
    from producer.policies.registry import AdapterRegistry
    from protocol.channel.client import ZmqClient
    from protocol.wire.messages import Ack, Group, Hello, Lease, Nack, Welcome

    receive = Link._receive

    def watched_receive(link: Any, message: Any) -> bool:
        match message:
            case Ack() | Nack():
                kept = link._outbox._kept.get(message.lease_id)
                outcome = message.outcome if isinstance(message, Ack) else message.reason
                digest = digest_of_message(kept.answer) if kept and isinstance(kept.answer, Group) else None
                log.note(type(message).__name__.lower(), lease_id=message.lease_id, outcome=outcome, digest=digest)
                aim.reach("ack.received")
                result = receive(link, message)
                aim.reach("ack.settled")
                return result
            case Welcome():
                aim.reach("welcome.received")
            case Lease():
                aim.reach("lease.received")
                result = receive(link, message)
                aim.reach("lease.begun")
                return result
        return receive(link, message)

    Link._receive = watched_receive  # type: ignore[method-assign]

    send = ZmqClient.send
    names: dict[type, str] = {Group: "group", Hello: "hello"}

    def watched_send(channel: Any, message: Any) -> bool:
        name = names.get(type(message))
        if name is None:
            return send(channel, message)
        aim.reach(f"{name}.begin")
        sent = send(channel, message)
        aim.reach_when_sent(f"{name}.sent")
        return sent

    ZmqClient.send = watched_send  # type: ignore[method-assign]
    put = Mailbox.put

    def watched_put(mailbox: Mailbox, mail: Any) -> None:
        if not isinstance(mail, Group | Nack):
            return put(mailbox, mail)
        aim.reach("answer.begin")
        put(mailbox, mail)
        return aim.reach("answer.kept")

    Mailbox.put = watched_put  # type: ignore[method-assign]
    aim.around(AdapterRegistry, "offer", "policy.arrived", None)
