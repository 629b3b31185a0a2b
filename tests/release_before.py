"""The release before, as its peers see it: schema 1, with plain msgpack and zlib and without a line of this release.

It must never change: it stands for programs that are out there. Each end refuses what that release refused, a frame of
another schema above all: its producer ends, its trainer answers with a `reject`.
"""

import struct
import zlib
from typing import Any

import msgpack
import zmq

FIELDS = {
    "hello": {"producer", "facts", "capacity", "held"},
    "welcome": {"run_id", "session", "policy", "heartbeat_interval_s"},
    "reject": {"problems"},
    "lease": {
        *("lease_id", "prompt_id", "attempt", "prompt", "columns", "sampling", "policy_floor", "timeout_s"),
    },
    "group": {
        *("lease_id", "policy_version", "prompt_ids", "completion_lengths", "completion_ids", "logprobs", "rewards"),
        *("truncated", "generation_s", "reward_s"),
    },
    "ack": {"lease_id", "outcome", "policy"},
    "nack": {"lease_id", "reason", "detail"},
    "policy": {"policy"},
    "heartbeat": {
        *("policy_version", "capacity", "held", "tokens_generated", "busy_s"),
        *("waiting", "generating", "scoring", "unacked"),
    },
    "bye": {"reason"},
    "blob_request": {"digest", "offset", "length"},
    "blob_chunk": {"digest", "offset", "data"},
    "blob_missing": {"digest"},
}
FACTS = {
    "base_model_digest": "0" * 64,
    "tokenizer_digest": "1" * 64,
    "dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "max_lora_rank": 64,
    "max_loras": 64,
    "max_model_len": 1024,
    "reward_names": ["reward"],
}


class OtherReleaseError(Exception):
    """A frame of another schema."""


def encode(**body: Any) -> bytes:
    assert set(body) == {"type", *FIELDS[body["type"]]}
    prefix, packed = struct.pack("<2sH", b"SL", 1), msgpack.packb(body)
    return prefix + struct.pack("<I", zlib.crc32(prefix + packed)) + packed


def decode(frame: bytes) -> dict[str, Any]:
    magic, schema, crc = struct.unpack("<2sHI", frame[:8])
    assert magic == b"SL"
    assert crc == zlib.crc32(frame[:4] + frame[8:])
    if schema != 1:
        raise OtherReleaseError(f"peer speaks protocol schema {schema}, this process speaks 1")
    body: dict[str, Any] = msgpack.unpackb(frame[8:])
    assert set(body) == {"type", *FIELDS[body["type"]]}, body
    return body


class _Sockets:
    def __init__(self, kind: int) -> None:
        self.context = zmq.Context()
        self.control, self.blobs = (self.context.socket(kind) for _ in range(2))
        self.poller = zmq.Poller()
        for socket in (self.control, self.blobs):
            socket.setsockopt(zmq.LINGER, 0)
            self.poller.register(socket, zmq.POLLIN)

    def arrived(self, timeout_s: float) -> list[list[bytes]]:
        return [socket.recv_multipart() for socket, _ in self.poller.poll(round(timeout_s * 1000))]

    def close(self) -> None:
        for socket in (self.control, self.blobs):
            socket.close()
        self.context.term()


class Producer:
    """Answers its first `max_answers` leases at once, with four completions of one token, and downloads every policy."""

    def __init__(self, name: str, control: str, blobs: str, **facts: Any) -> None:
        self.name = name
        self.endpoints = (control, blobs)
        self.facts = FACTS | facts
        self.received: list[dict[str, Any]] = []
        self.blob = b""
        self.max_answers = 1000
        self._resets = 0
        self.sockets = _Sockets(zmq.DEALER)
        self.reset()

    def reset(self) -> None:
        self.sockets.close()
        self.sockets = _Sockets(zmq.DEALER)
        self._resets += 1
        for socket, endpoint in zip((self.sockets.control, self.sockets.blobs), self.endpoints, strict=True):
            socket.setsockopt(zmq.ROUTING_ID, f"{self.name}/{self._resets}".encode())
            socket.connect(endpoint)
        self.say(type="hello", producer=self.name, facts=self.facts, capacity=8, held=[])

    def close(self) -> None:
        self.sockets.close()

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["type"] == kind]

    def say(self, **body: Any) -> None:
        (self.sockets.blobs if body["type"] == "blob_request" else self.sockets.control).send(encode(**body))

    def beat(self) -> None:
        self.say(
            type="heartbeat", policy_version=0, capacity=8, held=[], tokens_generated=len(self.all("lease")) * 4,
            busy_s=0.0, waiting=0, generating=0, scoring=0, unacked=0,
        )  # fmt: skip

    def step(self, timeout_s: float = 0.05) -> None:
        """Raises OtherReleaseError as that release ended."""
        for [frame] in self.sockets.arrived(timeout_s):
            message = decode(frame)
            self.received.append(message)
            match message:
                case {"type": "welcome" | "policy", "policy": policy}:
                    self.say(type="blob_request", digest=policy["digest"], offset=0, length=2**20)
                case {"type": "lease"} if len(self.all("lease")) <= self.max_answers:
                    self.say(**group(message["lease_id"], 0))
                case {"type": "blob_chunk", "data": data}:
                    self.blob = data
                case {"type": "bye", "reason": "unknown_session"}:
                    self.reset()
                case {"type": "bye"}:
                    self.say(type="bye", reason="stopping")


def group(lease_id: str, policy_version: int) -> dict[str, Any]:
    return {
        "type": "group",
        "lease_id": lease_id,
        "policy_version": policy_version,
        "prompt_ids": struct.pack("<2i", 3, 4),
        "completion_lengths": struct.pack("<4i", 1, 1, 1, 1),
        "completion_ids": struct.pack("<4i", 5, 6, 7, 8),
        "logprobs": struct.pack("<4f", -1, -1, -1, -1),
        "rewards": struct.pack("<4f", 0, 1, 0, 1),
        "truncated": bytes(4),
        "generation_s": 0.5,
        "reward_s": 0.25,
    }


class Trainer:
    """Keeps one lease out with every producer that it let in, acknowledges every group and serves one blob."""

    def __init__(self, control: str, blobs: str, *, digest: str, blob: bytes) -> None:
        self.sockets = _Sockets(zmq.ROUTER)
        self.sockets.control.bind(control)
        self.sockets.blobs.bind(blobs)
        self.policy = {"version": 0, "digest": digest, "num_bytes": len(blob)}
        self.blob = blob
        self.members: set[bytes] = set()
        self.received: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.num_leases = 0

    def close(self) -> None:
        self.sockets.close()

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["type"] == kind]

    def say(self, peer: bytes, **body: Any) -> None:
        socket = self.sockets.blobs if body["type"] == "blob_chunk" else self.sockets.control
        socket.send_multipart([peer, encode(**body)])

    def lease(self, peer: bytes) -> None:
        self.num_leases += 1
        self.say(
            peer, type="lease", lease_id=f"0-{self.num_leases}-0-1-old", prompt_id=self.num_leases, attempt=1, prompt="1+1=",
            columns={}, sampling={"num_generations": 4, "max_completion_length": 4, "temperature": 1.0},
            policy_floor=0, timeout_s=60.0,
        )  # fmt: skip

    def step(self, timeout_s: float = 0.05) -> None:
        for peer, frame in self.sockets.arrived(timeout_s):
            try:
                message = decode(frame)
            except OtherReleaseError as error:
                self.refused.append(str(error))
                self.say(peer, type="reject", problems=[f"{error}: install the same release on both sides"])
                continue
            self.received.append(message)
            match message:
                case {"type": "hello"}:
                    self.members.add(peer)
                    self.say(
                        peer, type="welcome", run_id="run", session="old", policy=self.policy, heartbeat_interval_s=0.1
                    )
                    self.lease(peer)
                case {"type": "blob_request", "digest": digest}:
                    self.say(peer, type="blob_chunk", digest=digest, offset=0, data=self.blob)
                case {"type": "bye"}:
                    self.members.discard(peer)
                case _ if peer not in self.members:
                    self.say(peer, type="bye", reason="unknown_session")
                case {"type": "heartbeat"}:
                    self.say(peer, type="policy", policy=self.policy)
                case {"type": "group", "lease_id": lease_id}:
                    self.say(peer, type="ack", lease_id=lease_id, outcome="accepted", policy=self.policy)
                    self.lease(peer)
