"""A sandbox of Harbor where no container runs: bubblewrap shows commands this machine's programs, and folders of their own."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult  # type: ignore[import-not-found]

FOLDERS = (
    "app",
    "installed-agent",
    "logs/agent",
    "logs/artifacts",
    "logs/verifier",
    "root",
    "solution",
    "tests",
    "tmp",
)


class Sandbox(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
        self._command = ["bwrap", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--dev", "/dev"]
        self._command += ["--proc", "/proc", "--unshare-net", "--clearenv", "--setenv", "PATH", "/usr/bin:/usr/sbin"]
        for name in ("bin", "lib", "lib64", "sbin"):
            self._command += ["--symlink", f"usr/{name}", f"/{name}"]
        for folder in FOLDERS:
            self._at(folder).mkdir(parents=True)
        for place in {folder.split("/")[0] for folder in FOLDERS}:
            self._command += ["--bind", str(self._at(place)), f"/{place}"]

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self._root)

    async def upload_file(self, source_path: Any, target_path: Any) -> None:
        self._at(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._at(target_path))

    async def upload_dir(self, source_dir: Any, target_dir: Any) -> None:
        shutil.copytree(source_dir, self._at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: Any, target_path: Any) -> None:
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir: Any, target_dir: Any) -> None:
        shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> ExecResult:
        given = [part for name, value in (env or {}).items() for part in ("--setenv", name, value)]
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *given,
            "--chdir",
            cwd or "/app",
            "bash",
            "-c",
            command,
            stdin=null,
            stdout=pipe,
            stderr=pipe,
        )
        said, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=said.decode(), stderr=errors.decode(), return_code=process.returncode)

    def _at(self, path: Any) -> Path:
        return self._root / str(path).lstrip("/")
