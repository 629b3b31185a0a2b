"""Clients and agents of a soak, well-behaved and rude, on threads of the harness.

Guarantee: what they do is drawn from a seed; a producer that goes away, or refuses, harms none of them. `counts` says what was
done, so that a soak without load is noticed.
"""

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from campaigns.soak.run_folder import RunFolder

_AGENTS = 8
_TIMEOUT_S = 20.0
_PAUSE_S = 0.2
_MESSAGES = [{"role": "user", "content": "1+1="}]
_LEFT_EARLY_S = 0.1


class Clients:
    """Started by the context, ended with it."""

    def __init__(self, runs: list[RunFolder], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._over = threading.Event()
        self._mutex = threading.Lock()
        work: list[tuple[Callable[[Path, random.Random], str], Path]] = []
        for run in runs:
            work += [(ask, run.run_dir), (be_rude, run.run_dir)]
            if run.has_agents:
                work += [(do_task, run.run_dir)] * _AGENTS
        self._threads = [
            threading.Thread(target=self._repeat, args=(*each, random.Random(1000 * seed + number)), daemon=True)
            for number, each in enumerate(work)
        ]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * _TIMEOUT_S)

    def _repeat(self, act: Callable[[Path, random.Random], str], run_dir: Path, chance: random.Random) -> None:
        while not self._over.wait(chance.uniform(0, _PAUSE_S)):
            try:
                outcome = act(run_dir, chance)
            except (httpx.HTTPError, OSError, ValueError, LookupError) as error:
                outcome = f"{act.__name__}: {type(error).__name__}"
            with self._mutex:
                self.counts[outcome] += 1


def address_in(folder: Path, chance: random.Random) -> str:
    """HOST:PORT of one of those that are announced there."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise LookupError("nobody is there")
    return str(json.loads(chance.choice(files).read_text())[0]["targets"][0])


def ask(run_dir: Path, chance: random.Random) -> str:
    """One request, as a client of OpenAI's API makes it."""
    with httpx.Client(base_url=f"http://{address_in(run_dir / 'serve', chance)}/v1", timeout=_TIMEOUT_S) as http:
        model = chance.choice(http.get("/models").json()["data"])["id"]  # also versions that are about to go
        body = {"model": model, "messages": _MESSAGES}
        kind = chance.choice(("whole", "whole", "stream", "stream", "left early", "text"))
        if kind == "text":
            http.post("/completions", json={"model": model, "prompt": "1+1="})
        elif kind == "left early":
            with contextlib.suppress(httpx.TimeoutException):
                http.post("/chat/completions", json=body, timeout=_LEFT_EARLY_S)
        elif kind == "whole":
            http.post("/chat/completions", json=body)
        else:
            with http.stream("POST", "/chat/completions", json=body | {"stream": True}) as answer:
                for _ in answer.iter_lines():
                    if chance.random() < 0.2:
                        return "asked: stream left"
        return f"asked: {kind}"


def be_rude(run_dir: Path, chance: random.Random) -> str:
    """What nobody should send, to the endpoint or to the metrics."""
    place = chance.choice(("serve", "metrics"))
    host, port = address_in(run_dir / place, chance).rsplit(":", 1)
    kind, data = chance.choice(
        (
            ("nothing", b""),
            ("half a head", b"GET /metr"),
            ("half a body", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
             b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"),
            ("no JSON", b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\n"
             b"Content-Type: application/json\r\nContent-Length: 3\r\n\r\n{1}"),
            ("no HTTP", b"\x01\x00\x05\x00abcd\r\n\r\n"),
        )
    )  # fmt: skip
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(data)
        time.sleep(chance.uniform(0, 2.0))
    return f"rude: {kind} to {place}"


def do_task(run_dir: Path, chance: random.Random) -> str:
    """Takes a task and does it; now and then badly, or not at all."""
    with httpx.Client(base_url=f"http://{address_in(run_dir / 'serve', chance)}/v1", timeout=_TIMEOUT_S) as http:
        if chance.random() < 0.1:
            with contextlib.suppress(httpx.TimeoutException):
                http.post("/rollouts", json={"wait_s": 10}, timeout=_LEFT_EARLY_S)
            return "agent: left before it had a task"
        answer = http.post("/rollouts", json={"wait_s": 1})
        if answer.status_code != httpx.codes.OK:
            return "agent: no task"
        task = answer.json()
        if chance.random() < 0.02:
            return "agent: left its task"
        failed = task["episodes"][0] if chance.random() < 0.05 else None
        for episode in task["episodes"]:
            headers = {"x-episode": episode}
            for _ in range(chance.choice((1, 1, 2))):
                http.post("/completions", json={"model": "policy", "prompt": task["prompt"]}, headers=headers)
            if episode == failed:
                http.post(f"/rollouts/{episode}/failure", json={"reason": "the world ended"})
            else:
                http.post(f"/rollouts/{episode}/reward", json={"judged": float(chance.random() < 0.5)})
        return "agent: did its task"
