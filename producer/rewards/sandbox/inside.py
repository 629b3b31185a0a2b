"""What becomes the sandbox: a script that builds the walls around itself and then starts the untrusted program within.

Guarantee: the program starts after the last wall stands, or not at all (exit status 120, with the reason on standard error).
It runs as `python -I -S inside.py SPEC` with a JSON object and imports nothing of this project, so that it starts in
milliseconds and brings no file of ours inside.

Walls: a user namespace in which the program is nobody, without capabilities; a network namespace without any interface; a PID
namespace whose first process is this script, so that all others die with it; a mount namespace whose root holds read-only binds
of the interpreter and the system's libraries, and a small /tmp; IPC and UTS namespaces; resource limits; and a filter of system
calls.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

_FAILED = 120
_CHANNEL = 3  # the program's, to whoever runs it
_HOME = "/tmp"  # noqa: S108 - the sandbox has its own
_NOBODY = 65_534
_CLONE_NEWNS = 0x20000
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x8000000 | 0x4000000  # user, net, PID, IPC, UTS
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_BIND, _MS_PRIVATE = 2, 4, 0x4000, 0x1000, 1 << 18
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_MOUNT_SETATTR = 442  # the same on every architecture
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DEVICES = ("null", "urandom")  # a shared mapping of zero is memory that nobody counts

# The kernel's number of a machine in audit records.
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {  # what a program has no use for and an attack on the kernel has: (x86_64, aarch64)
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "swapon": (167, 224), "reboot": (169, 142), "init_module": (175, 105), "delete_module": (176, 106),
    "finit_module": (313, 273), "kexec_load": (246, 104), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "perf_event_open": (298, 241), "bpf": (321, 280),
    "userfaultfd": (323, 282), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "quotactl": (179, 60), "acct": (163, 89),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # Memory that is resident in no process, and so neither counted nor limited:
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
}  # fmt: skip
_MMAP = (9, 222)
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
_SOCKET = (41, 198)
_CLONE, _CLONE3 = (56, 220), 435
_FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: they end in the namespace; others (vsock) may not
_EPERM, _ENOSYS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)


class _SystemCallError(Exception):
    pass


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _SystemCallError(f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec.get("channel") is not None:
        os.dup2(spec["channel"], _CHANNEL)
        os.closerange(_CHANNEL + 1, 64)
    try:
        if os.uname().machine not in _MACHINES:
            raise _SystemCallError(f"{os.uname().machine}: only {' and '.join(_MACHINES)} are supported")
        _build_walls(spec)
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != spec["parent"]:
            os._exit(_FAILED)
    except (_SystemCallError, OSError) as error:
        _fail(error)
    first = os.fork()
    if first == 0:
        try:
            _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _be_the_first(spec)
        except BaseException as error:
            _fail(error)
    signal.signal(signal.SIGTERM, lambda _number, _frame: os.kill(first, signal.SIGKILL))
    os.closerange(0, _CHANNEL + 1)
    _, status = os.waitpid(first, 0)  # the kernel lets the first process go when all others are gone
    os._exit(_as_exit(status))


def _build_walls(spec: dict[str, Any]) -> None:
    """An ordinary user needs the user namespace for all others. Root can do without, and becomes nobody before it enters
    one, so that no file of root's is its own inside; it may read what nobody may not, such as an interpreter in /root."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    as_root = os.getuid() == 0 and _libc.unshare(_CLONE_NEWNS) == 0
    if as_root:
        _new_root(spec)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self would be root's
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NAMESPACES if as_root else _NAMESPACES | _CLONE_NEWNS)
    for file, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        descriptor = os.open(f"self/{file}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    if not as_root:
        _new_root(spec)
    os.close(proc)


class _Places:
    """What the program may read, held open, since the new root hides what is below its place."""

    def __init__(self, readable: list[str]) -> None:
        places = [place for place in dict.fromkeys([*readable, *_SYSTEM]) if os.path.lexists(place)]
        places = [place for place in places if not any(place.startswith(f"{other}/") for other in places)]
        self.links = {place: os.readlink(place) for place in places if os.path.islink(place)}
        self.folders = [place for place in places if os.path.isdir(place) and place not in self.links]
        wanted = [place for place in places if place not in self.links] + [f"/dev/{name}" for name in _DEVICES]
        self.open = {place: os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC) for place in wanted}


def _be_the_first(spec: dict[str, Any]) -> None:
    """Of the PID namespace: starts the program, waits for it, and takes all others along when it leaves."""
    with open(f"{_HOME}/main.py", "wb") as stream:
        stream.write(_read(int.from_bytes(_read(8), "little")))
    program = os.fork()
    if program == 0:
        try:
            _restrict(spec)
            environment = {"PATH": "/usr/bin", "HOME": _HOME, "LC_ALL": "C.UTF-8"}
            os.execve(spec["command"][0], spec["command"], environment)  # noqa: S606 - there is no shell inside
        except BaseException as error:
            _fail(error)
    os.closerange(0, _CHANNEL + 1)
    while True:
        ended, status = os.wait()
        if ended == program:
            os._exit(_as_exit(status))


def _read(num_bytes: int) -> bytes:
    """Exactly so many of standard input; what follows is the program's."""
    parts = []
    while num_bytes > 0:
        part = os.read(0, num_bytes)
        if not part:
            raise EOFError("the program did not arrive")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _new_root(spec: dict[str, Any]) -> None:
    root = _HOME
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    places = _Places(spec["readable"])
    _mount_tmpfs(root, 2**20)
    for place, descriptor in places.open.items():
        target = root + place
        if place in places.folders:
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        _call("mount", f"/proc/self/fd/{descriptor}".encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
    for place, target in places.links.items():
        os.makedirs(os.path.dirname(root + place), exist_ok=True)
        os.symlink(target, root + place)
    for folder in ("tmp", "old"):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    pivot_root = (155, 41)[list(_MACHINES).index(os.uname().machine)]
    _call("syscall", pivot_root, root.encode(), f"{root}/old".encode())
    os.chdir("/")
    _call("umount2", b"/old", _MNT_DETACH)
    os.rmdir("/old")
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _mount_tmpfs(_HOME, spec["disk_bytes"])
    os.chdir(_HOME)


def _mount_tmpfs(place: str, num_bytes: int) -> None:
    options = f"size={num_bytes},nr_inodes=4096,mode=1777".encode()
    _call("mount", b"tmpfs", place.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _restrict(spec: dict[str, Any]) -> None:
    """The last walls, before the program: it loses its capabilities when it is executed as an ordinary user."""
    os.setsid()
    limits = {
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["disk_bytes"],
        resource.RLIMIT_NPROC: spec["processes"] + 2,  # this script counts, too, on both sides of the wall
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_system_calls()


def _filter_system_calls() -> None:
    machine = os.uname().machine
    program = _filter(_MACHINES[machine], list(_MACHINES).index(machine))
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, 2, header, 0, 0)


def _filter(audit: int, column: int) -> bytes:
    """Classic BPF: refuses foreign ABIs, the calls above, sockets of other families, new namespaces by clone, and mappings
    whose pages stay when no process has them: shared ones of no file, and huge ones."""
    load, equal, greater, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse, missing = 0x80000000, 0x7FFF0000, 0x50000 | _EPERM, 0x50000 | _ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        steps += [(greater, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # x32
    for numbers in _REFUSED.values():
        steps += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    steps += [
        (equal, 0, 1, _CLONE3),
        (answer, 0, 0, missing),
    ]  # its flags are in memory; the C library takes clone then
    steps += [
        (equal, 0, 4, _CLONE[column]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, _NAMESPACES | _CLONE_NEWNS),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    steps += [
        (equal, 0, 6, _MMAP[column]),
        (load, 0, 0, 40),
        (any_bit, 3, 0, _MAP_HUGETLB),
        (any_bit, 0, 1, _MAP_ANONYMOUS),
        (any_bit, 1, 0, _MAP_SHARED),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    steps += [(equal, 0, 2 + len(_FAMILIES), _SOCKET[column]), (load, 0, 0, 16)]
    steps += [(equal, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)]
    steps += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _as_exit(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _fail(error: BaseException) -> NoReturn:
    os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(_FAILED)


if __name__ == "__main__":
    main()
