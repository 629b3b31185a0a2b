"""The last step into the sandbox: what runs in bubblewrap's namespaces and becomes the untrusted program.

Guarantee: the program starts when its files and processes are bounded, its capabilities are gone and the filter of system calls
is loaded, or not at all. It runs as `python -I -S -c TEXT SPEC` with a JSON object and imports nothing of this project.
"""

import ctypes
import json
import os
import resource
import sys

_MS_NOSUID, _MS_NODEV = 2, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_MAX_FILES = 4096  # memory of an empty file is counted nowhere else

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    spec = json.loads(sys.argv[1])
    options = f"size={spec['disk_bytes']},nr_inodes={_MAX_FILES},mode=1777".encode()
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir("/tmp")  # noqa: S108 - of its own
    limits = {
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_FSIZE: spec["disk_bytes"],
        resource.RLIMIT_NPROC: spec["processes"] + 1,  # bubblewrap's first process counts, too
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)  # the others go when the program is executed
    code = bytes.fromhex(spec["filter"])
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Filter(len(code) // 8, code)), 0, 0)
    os.write(spec["ready"], b"1")
    os.close(spec["ready"])
    os.execv(spec["command"][0], spec["command"])  # noqa: S606 - there is no shell inside


main()
