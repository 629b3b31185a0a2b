"""A trainer that does nothing but give a bundle, over real sockets."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consumer.link.offered_bundle import OfferedBundle
from protocol.channel.keys import generate, trainer_keys, write_public
from protocol.channel.server import ZmqServer
from protocol.wire.messages import BlobMissing, BlobRequest, BundleOffer, BundleRequest, Hello
from slipstream_extras.bundle.bundle import Bundle, BundledFile, digest_of, encode

CONFIG = """\
run_dir: run
model: {path: org/model}
dataset: {path: of-the-trainer}
rewards: {functions: [{function: rewards.py:exact}]}
"""


def bundle_of(config: str = CONFIG, rewards: str = "def exact(**_): return [1.0]\n", **fields: Any) -> bytes:
    return encode(
        Bundle([BundledFile("run.yaml", config.encode()), BundledFile("rewards.py", rewards.encode())], **fields)
    )


def offer_of(data: bytes, **changes: Any) -> BundleOffer:
    return BundleOffer(**{"digest": digest_of(data), "num_bytes": len(data), "chunk_bytes": 64} | changes)


@dataclass
class BundleServer:
    """Answers on a thread of its own. `forgets` are digests that it has no more when the chunks are asked for."""

    control: str
    blobs: str
    offered: OfferedBundle
    keys: Path | None = None
    next_offers: list[OfferedBundle] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "BundleServer":
        keys = trainer_keys(self.keys) if self.keys else None
        self._server = ZmqServer(self.control, self.blobs, 2**20, keys)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.wake()
        self._thread.join(10)
        self._server.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for peer, message in self._server.poll(0.1):
                self.received.append(message)
                match message:
                    case BundleRequest() | Hello():
                        self._server.send(peer, self.offered.answer)
                    case BlobRequest() if self.next_offers:
                        self.offered = self.next_offers.pop(0)
                        self._server.send(peer, BlobMissing(message.digest))
                    case BlobRequest():
                        chunk = self.offered.chunk(message)
                        self._server.send(peer, chunk or BlobMissing(message.digest))


def make_keys(folder: Path, *producers: str) -> None:
    """`folder/trainer` and `folder/NAME` for each producer, which are authorized."""
    generate(folder / "trainer", "trainer")
    for name in producers:
        public = generate(folder / name, name)
        write_public(folder / "trainer" / "authorized" / f"{name}.public", name, public)
        (folder / name / "trainer.public").write_bytes((folder / "trainer" / "trainer.public").read_bytes())


def served(stack: ExitStack, folder: Path, data: bytes, **changes: Any) -> BundleServer:
    """Over a socket in `folder`."""
    control = f"ipc://{folder}/control.ipc"
    offered = OfferedBundle(offer_of(data, **changes), data)
    return stack.enter_context(BundleServer(control, f"{control}.blobs", offered))
