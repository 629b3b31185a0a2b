"""The servers of NeMo Gym 0.4.0 on loopback: stand-ins for an agent server and for what its `simple_agent` and `vllm_model` make
of a row, and the real ones.
"""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@contextmanager
def agent_server(answer: Callable[[Row], tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """Its address. `answer` gives status, headers and body to the row that `/run` is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200 if self.path == "/openapi.json" else 404, {}, b"{}")

        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/run", "application/json")
            self._say(*answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None: ...  # a client that went away

    with Server(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def verified(row: Row, reward: Any, **more: Any) -> tuple[int, dict[str, str], bytes]:
    """What `/run` answers when all went well."""
    response = {"id": "resp_1", "object": "response", "output": []}
    return 200, {}, json.dumps(row | {"response": response, "reward": reward} | more).encode()


def refusal_of_the_policy(body: str) -> tuple[int, dict[str, str], bytes]:
    """What `/run` answers when the policy's endpoint refused a call: each server hands on what it was told, quoted."""
    for server in ("VLLMModel___policy_model", "SimpleAgent___agent", "SimpleAgent___agent"):
        body = json.dumps(f"Hit an exception in {server} calling an inner server: {body.encode()!r}")
    return 500, {}, body.encode()


def ask_policy(base_url: str, create_params: Row, said_before: list[dict[str, Any]]) -> str:
    """One model call of an agent, as `vllm_model` sends it."""
    others = {name: value for name, value in create_params.items() if name not in ("input", "model")}
    body = {"messages": create_params["input"] + said_before, **others, "model": "policy"}
    headers = {"content-type": "application/json", "authorization": "Bearer dummy_key"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


@contextmanager
def real_servers(python: str, folder: Path, config: dict[str, Any], *servers: str) -> Iterator[None]:
    """Those of `config` and the policy's model server, all in the virtual environment of `python`.

    Args:
        folder: short, because Ray has sockets below it.
        config: for `gym env start`.
        servers: the folders in which NeMo Gym has them.
    """
    environment = Path(python).parents[1]
    for server in (*servers, "responses_api_models/vllm_model", "environment_servers/legacy_agent"):  # the last of 0.7
        (folder / "venvs" / server).mkdir(parents=True)
        (folder / "venvs" / server / ".venv").symlink_to(environment)
    (folder / "gym.yaml").write_text(json.dumps(config))
    command = [str(environment / "bin" / "gym"), "env", "start", "--config", "gym.yaml", "--model-type", "vllm_model"]
    command += [f"+uv_venv_dir={folder}/venvs", "+skip_venv_if_present=true"]
    with (folder / "gym.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while "servers ready! " not in (said := (folder / "gym.log").read_text(errors="replace")):
            assert process.poll() is None, said[-3000:]
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Ray's processes, too
        process.wait(10)
