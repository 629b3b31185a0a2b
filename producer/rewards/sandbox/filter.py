"""The filter of system calls for programs in the sandbox, made by libseccomp.

Guarantee: it refuses foreign ABIs; calls that a program has no use for and an attack on the kernel has; sockets of other families
than unix; new namespaces; and memory that is resident in no process, which no limit would count.
"""

import ctypes
import errno
import os
from functools import cache

from protocol.errors import ConfigError

_REFUSED = """ptrace mount umount2 pivot_root chroot swapon reboot init_module delete_module finit_module kexec_load add_key
    request_key keyctl unshare setns perf_event_open bpf userfaultfd process_vm_readv process_vm_writev io_uring_setup open_tree
    move_mount fsopen fsmount mount_setattr quotactl acct open_by_handle_at name_to_handle_at
    memfd_create memfd_secret shmget shmat msgget semget mq_open vmsplice"""
_NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)  # of clone
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
_AF_UNIX = 1

_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x50000
_ACTION_FOR_FOREIGN_ABIS = 2  # SCMP_FLTATR_ACT_BADARCH
_NOT_EQUAL, _MASKED_EQUAL = 1, 7


class _Comparison(ctypes.Structure):
    """Compares an argument of a call: its index, the operator, and two values."""

    _fields_ = (("index", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _all_set(index: int, flags: int) -> _Comparison:
    return _Comparison(index, _MASKED_EQUAL, flags, flags)


@cache
def system_call_filter() -> bytes:
    """The filter as the kernel takes it (classic BPF). Raises ConfigError if libseccomp is not installed, or too old to
    know all calls."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise ConfigError(
            f"rewards.functions: builtin code needs libseccomp ({error}); install it: apt install libseccomp2"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(name: str, *comparisons: _Comparison, error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        array = (_Comparison * len(comparisons))(*comparisons)
        action = ctypes.c_uint32(_ERRNO | error)
        if number == -1 or library.seccomp_rule_add_array(context, action, number, len(comparisons), array) != 0:
            raise ConfigError(
                f"rewards.functions: builtin code needs libseccomp 2.5.3 or newer: {name} is unknown to it"
            )

    try:
        library.seccomp_attr_set(context, _ACTION_FOR_FOREIGN_ABIS, ctypes.c_uint32(_KILL_PROCESS))
        for name in _REFUSED.split():
            refuse(name)
        refuse("clone3", error=errno.ENOSYS)  # its flags are in memory; the C library takes clone then
        for flag in _NAMESPACE_FLAGS:
            refuse("clone", _all_set(0, flag))
        refuse("mmap", _all_set(3, _MAP_SHARED | _MAP_ANONYMOUS))
        refuse("mmap", _all_set(3, _MAP_HUGETLB))
        refuse("socket", _Comparison(0, _NOT_EQUAL, _AF_UNIX, 0))
        with os.fdopen(os.memfd_create("filter"), "w+b") as file:
            library.seccomp_export_bpf(context, file.fileno())
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
