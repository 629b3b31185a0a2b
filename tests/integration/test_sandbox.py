"""The sandbox with programs that try to get out of it. Every one is contained, and nothing of it is left."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.errors import ConfigError
from slipstream_extras.judge.code import code, program_of
from slipstream_extras.judge.sandbox import ENVIRONMENT, Isolation, Limits, Outcome, Sandbox
from tests.processes import NewProcesses

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("bubblewrap")]
PR_SET_NAME = 15
LIMITS = Limits(time_s=60, memory_bytes=64 * 2**20, disk_bytes=4 * 2**20, processes=4, output_bytes=2**16)


def run(program: str, stdin: bytes = b"", **limits: Any) -> Outcome:
    """Runs it, and fails if a process or descriptor of it is left. Threads of tests before may close theirs meanwhile."""
    descriptors, started = len(os.listdir("/proc/self/fd")), NewProcesses()
    sandbox = Sandbox(Limits(**{**vars(LIMITS), **limits}))
    outcome = asyncio.run(sandbox.run(program, stdin))
    assert started.alive() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    return outcome


def test_an_ordinary_program_runs_with_its_input() -> None:
    outcome = run("import json, math, sys\nprint(math.sqrt(int(input())))\nsys.exit(3)", b"49\n")
    assert outcome == Outcome(3, b"7.0\n", b"", "itself")
    asyncio.run(Sandbox(LIMITS).check())


def test_the_self_test_of_a_slow_machine_may_take_longer_than_a_program() -> None:
    asyncio.run(Sandbox(Limits(time_s=0.001)).check())


def begun_late(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    command = Isolation.command
    wait = ["sh", "-c", f'sleep {seconds}; exec "$@"', "sh"]
    monkeypatch.setattr(Isolation, "command", lambda *given: [*wait, *command(*given)])


def test_the_time_of_a_program_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_late(monkeypatch, 6)
    assert run("print(1)", time_s=5) == Outcome(0, b"1\n", b"", "itself")


def test_a_program_that_never_begins_is_no_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_late(monkeypatch, 90)
    monkeypatch.setattr("slipstream_extras.judge.sandbox._START_S", 0.5)
    with pytest.raises(TimeoutError, match="did not start"):
        run("print(1)")


def test_a_fork_bomb() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    started = time.monotonic()
    assert run(bomb, time_s=1).ended == "time"
    assert time.monotonic() - started < 30
    counts = (
        "import os, time\nn = 0\ntry:\n    while n < 99:\n        os.fork() or time.sleep(90)\n        n += 1\n"
        "except OSError:\n    print(n)"
    )
    assert run(counts).output == b"3\n"  # and the program itself


def test_threads_count_as_processes() -> None:
    program = (
        "import threading, time\nn = 0\ntry:\n    while n < 99:\n"
        "        threading.Thread(target=time.sleep, args=(90,), daemon=True).start()\n"
        "        n += 1\nexcept RuntimeError:\n    print(n, flush=True)"
    )
    assert run(program).output == b"3\n"


def test_there_is_no_network() -> None:
    program = """
import socket
for address in (("127.0.0.1", PORT), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 5)
        print("connected", address)
    except OSError as error:
        print(error.errno)
for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family == socket.AF_PACKET else socket.SOCK_STREAM)
        print("opened", family)
    except PermissionError:
        print("refused")

"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(program.replace("PORT", str(server.getsockname()[1])))
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.output.split() == [b"1"] * 2 + [b"refused"] * 3, outcome


def test_files_outside_are_neither_seen_nor_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    program = f"""
import os, sys
for path in ({str(secret)!r}, "/etc/passwd", "/proc/1/environ", "/sys/kernel", "/run", {str(Path.cwd())!r} + "/Makefile"):
    if os.path.exists(path):
        print("sees", path)
for folder in ("/", "/usr", "/usr/lib", "/dev", os.path.dirname(os.__file__)):
    try:
        open(folder + "/written", "w")
        print("writes", folder)
    except OSError:
        pass
for path in ("/dev/null", os.__file__):
    try:
        os.chmod(path, 0o777)
        print("changes", path)
    except OSError:
        pass
print(sorted(os.environ), os.getcwd(), os.listdir())
"""
    outcome = run(program)
    assert outcome.output == b"['HOME', 'LC_ALL', 'PATH', 'PWD'] /tmp []\n", outcome


def test_its_own_files_are_bounded() -> None:
    program = """
import os
written = 0
try:
    for number in range(100):
        with open(f"file{number}", "wb") as stream:
            stream.write(bytes(2**20))
        written += 1
except OSError as error:
    print(written, error.errno)
"""
    assert run(program).output == b"4 28\n"
    empty = "n = 0\ntry:\n    while n < 9999:\n        open(str(n), 'w').close()\n        n += 1\nexcept OSError:\n    print(n)"
    assert run(empty).output == b"4095\n"  # and the folder
    assert run("open('big', 'wb').truncate(2**40)").code != 0


def test_memory_of_one_process_and_of_all_together() -> None:
    assert b"MemoryError" in run("x = bytearray(2**30)").errors
    shared = (
        "import os, time\nfor _ in range(3):\n    os.fork()\nx = bytearray(40 * 2**20)\n"
        "for i in range(0, len(x), 4096):\n    x[i] = 1\ntime.sleep(90)"
    )
    outcome = run(shared, processes=16)
    assert outcome.ended == "memory"


def test_memory_that_no_process_has_resident_is_refused() -> None:
    """memfd, segments and queues of System V, queues of POSIX, shared mappings without a file, huge pages, pages in a pipe."""
    program = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
SIZE, READ_WRITE = 2**26, mmap.PROT_READ | mmap.PROT_WRITE

def call(name, *arguments):
    ctypes.set_errno(0)
    return getattr(libc, name)(*arguments)

def mapped(flags):
    return -1 if call("mmap", None, SIZE, READ_WRITE, flags, -1, 0) == ctypes.c_void_p(-1).value else 0

def vmspliced():
    page = ctypes.create_string_buffer(4096)
    part = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
    return call("vmsplice", os.pipe()[1], part, 1, 0)

ATTEMPTS = {
    "memfd_create": lambda: call("memfd_create", b"x", 0),
    "memfd_secret": lambda: call("syscall", 447, 0),
    "shmget": lambda: call("shmget", 0, SIZE, 0o1600),
    "shmat": lambda: -1 if call("shmat", 0, None, 0) == -1 else 0,
    "msgget": lambda: call("msgget", 0, 0o1600),
    "semget": lambda: call("semget", 0, 100, 0o1600),
    "mq_open": lambda: call("syscall", NUMBER_OF_MQ_OPEN, b"x", os.O_CREAT | os.O_RDWR, 0o600, None),
    "vmsplice": vmspliced,
    "shared": lambda: mapped(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    "shared and validated": lambda: mapped(3 | mmap.MAP_ANONYMOUS),
    "huge": lambda: mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000),
}
for name, attempt in ATTEMPTS.items():
    if attempt() != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
print(mapped(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), os.path.exists("/dev/zero"), os.path.exists("/dev/shm"))
with open("file", "w+b") as file:
    file.truncate(4096)
    print(len(mmap.mmap(file.fileno(), 4096)))
"""
    mq_open = 240 if os.uname().machine == "x86_64" else 180
    outcome = run(program.replace("NUMBER_OF_MQ_OPEN", str(mq_open)))
    assert outcome.output == b"0 False False\n4096\n", outcome


def test_time_on_the_clock_and_on_the_processor() -> None:
    started = time.monotonic()
    assert run("import time\ntime.sleep(100)", time_s=0.5).ended == "time"
    assert run("while True: pass", time_s=0.5).ended == "time"
    assert time.monotonic() - started < 30


def test_endless_output_ends() -> None:
    outcome = run("while True: print('x' * 1000)")
    assert outcome.ended == "output"
    assert len(outcome.output) == 2**16


def test_daemons_and_zombies_end_with_their_program() -> None:
    name = f"left-{os.getpid()}"
    program = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl({PR_SET_NAME}, b"{name}")
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            time.sleep(3141)
        os._exit(0)
print("done", flush=True)
"""
    started = time.monotonic()
    outcome = run(program)
    assert (outcome.code, outcome.output, outcome.ended) == (0, b"done\n", "itself")
    assert time.monotonic() - started < 50
    assert not [p for p in psutil.process_iter(["name"]) if p.info["name"] == name]


def test_it_has_no_rights_to_take() -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.ptrace(16, 1, 0, 0), libc.chroot(b"/tmp"))
for action in (lambda: os.setuid(0), lambda: os.kill(1, 9), lambda: os.mknod("d", 0o60600, 0x800)):
    try:
        action()
        print("allowed")
    except OSError:
        print("refused")
"""
    outcome = run(program)
    assert outcome.output == b"-1 -1 -1 -1\nrefused\nallowed\nrefused\n", (
        outcome
    )  # a first process ignores it from within


def _last_words(processes: list[psutil.Process]) -> list[list[str]]:
    """Of their commands; some of the processes may have ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(process.cmdline()[-1:])
    return found


def test_its_end_is_the_end_of_who_started_it() -> None:
    starter = (
        "import asyncio, sys\nfrom slipstream_extras.judge.sandbox import Limits, Sandbox\n"
        "asyncio.run(Sandbox(Limits(time_s=60)).run('import time; print(1, flush=True); time.sleep(2718)'))"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    inner: list[Any] = []
    try:
        deadline = time.monotonic() + 60
        while ["/main.py"] not in _last_words(inner) and time.monotonic() < deadline:
            time.sleep(0.02)
            inner = psutil.Process(process.pid).children(recursive=True)
        assert len(inner) >= 4
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(inner, timeout=60)
    assert alive == []


def _as_a_service() -> None:
    """PR_SET_NO_NEW_PRIVS, as in the systemd units."""
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="every other test runs as an ordinary user then")
def test_an_ordinary_user_needs_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no /usr/bin/python3, and nobody may not read this interpreter")
    monkeypatch.setattr("os.geteuid", lambda: 54_321)
    isolation, (ready, held) = Isolation(LIMITS, python), os.pipe()
    with (
        os.fdopen(os.memfd_create("main.py"), "w+b") as main,
        os.fdopen(ready, "rb") as ready_of,
        os.fdopen(held) as end,
    ):
        main.write(b"import os; print(os.getuid(), os.listdir('/tmp'))")
        main.seek(0)
        done = subprocess.run(
            isolation.command(main.fileno(), held), capture_output=True, timeout=30, user=54_321, group=54_321,
            extra_groups=[], cwd="/", env=ENVIRONMENT, preexec_fn=_as_a_service, pass_fds=[main.fileno(), held],
        )  # fmt: skip
        end.close()
        assert (done.stdout, done.stderr, ready_of.read()) == (b"1000 []\n", b"", b"1")


def test_where_nothing_isolates_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run("import os; os._exit(120)").code == 120, "a program's own status is none of the isolation's"
    broken = tmp_path / "inside.py"
    broken.write_text("raise OSError('mount: refused')")
    for place, value in (("_INSIDE", broken), ("_ISOLATED", ["--no-such-option"])):
        with monkeypatch.context() as patch:
            patch.setattr(f"slipstream_extras.judge.sandbox.{place}", value)
            with pytest.raises(ConfigError, match=r"(?s)cannot hold untrusted code: .*sysctl user.max_user_namespaces"):
                asyncio.run(Sandbox(LIMITS).check())
            with pytest.raises(ConfigError, match="Nothing was run"):
                code()
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match=r"there is no bwrap.*apt install bubblewrap"):
        code()


def test_the_reward_for_code() -> None:
    assert program_of("text\n```\nold\n```\nthen\n```python\nx = 1\n```") == "x = 1\n"
    assert program_of("x = 2") == "x = 2"
    score = code(time_s=60, memory_bytes=2**27)
    texts = [
        "```python\ndef add(a, b):\n    return a + b\n```",
        "def add(a, b):\n    return a - b",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def add(a, b): '''",
        "no code at all",
    ]
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    assert asyncio.run(score(texts, tests=[tests] * 6)) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    share = code(score="share", time_s=60)
    doubles = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "6\n"}]
    assert asyncio.run(share(["print(4)", "print(2 * int(input()))"], tests=[doubles] * 2)) == [0.5, 1.0]
    assert "expected Python" in str(asyncio.run(share(["x"], tests=[3]))[0])
    assert asyncio.run(share(["print(2 * int(input()))"], tests=[[{"input": 2, "output": 4.0}]])) == [1.0]
    for bad in ({"input": None, "output": "4"}, {"input": "2", "output": True}):
        assert "expected a text or a number" in str(asyncio.run(share(["x"], tests=[[bad]]))[0])
