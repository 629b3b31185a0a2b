"""Commands that a test starts from outside, and the daemons that these start: forks of warm processes too.

Guarantee: a daemon ends with the process that stands for it (`tests.integration.warm_python`), SIGKILL included.
"""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from campaigns.chaos.fleet import Role, Zygote
from tests.integration.warm import zygote

_LOOK_EVERY_S = 0.05


class WarmCommands:
    """
    Args:
        folder: for a socket, for `python`, which is to start the commands, and for what tells their children of it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.python = str(folder / "python")
        address, script = folder / "socket", Path(__file__).with_name("warm_python.py")
        Path(self.python).write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -I -S "{script}" "{sys.executable}" "{address}" "$@"\n'
        )
        Path(self.python).chmod(0o755)
        (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {self.python!r}\n")
        places = (str(folder), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2]))
        self.variables = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        # They end with the thread that starts them.
        self._zygotes: dict[Role, Zygote] = {"trainer": zygote("trainer"), "producer": zygote("producer")}
        self._starting = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._stand_for, args=(connection,), daemon=True).start()

    def _stand_for(self, connection: socket.socket) -> None:
        with connection:
            line = b""
            while b"\n" not in line:
                if not (part := connection.recv(2**16)):
                    return
                line += part
            request, _, signals = line.partition(b"\n")
            asked = json.loads(request)
            streams = [f"/proc/{asked['pid']}/fd/{number}" for number in range(3)]
            with self._starting:
                daemon = self._zygotes[asked["role"]].start(
                    asked["argv"],
                    log=Path(streams[1]),
                    input=streams[0],
                    errors=streams[2],
                    module=asked["argv"][0],
                    python=self.python,
                    environment=asked["environment"],
                    cwd=asked["cwd"],
                    spawns=False,
                    network=None,
                )
            connection.settimeout(_LOOK_EVERY_S)
            try:
                while (status := daemon.poll()) is None:
                    for number in signals:
                        daemon.send(number)
                    signals = _received(connection)
                connection.sendall(f"{status}\n".encode())
            except ConnectionError:
                daemon.send(signal.SIGKILL)


def _received(connection: socket.socket) -> bytes:
    """Nothing, if nothing comes for a moment. Raises ConnectionError if the other side has ended."""
    try:
        data = connection.recv(64)
    except TimeoutError:
        return b""
    if not data:
        raise ConnectionResetError
    return data
