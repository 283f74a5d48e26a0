"""Fences of the Linux kernel around the calling process, by system calls; each tells whether it stands.

    namespaces   no network (an empty network namespace has no route, not even a loopback that is up); no process but
                 the program's own can be seen or signalled; the whole file system read-only; a private, small tmpfs
    landlock     files: nothing may be written or made outside the scratch folder, nothing read but what Python needs;
                 TCP ports closed and signals kept inside where the kernel knows how (6.7, 6.12)
    user         a number that no one has, so that limits count only its processes; no way to gain rights

None of them is a virtual machine: they do not hold against a program that attacks the kernel itself.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE = {"mount": 0x00020000, "ipc": 0x08000000, "user": 0x10000000, "processes": 0x20000000, "network": 0x40000000}
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_PR_SET_NO_NEW_PRIVS, _PR_SET_KEEPCAPS = 38, 8
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, (444, 445, 446)  # the same numbers on all architectures
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1
_CAPABILITIES_3, _CAP_DAC_READ_SEARCH = 0x20080522, 2

# Rights of landlock(7): what of them a file descriptor's folder gives.
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
_ABI_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_TCP, _SCOPES = 0b11, 0b11


def _call(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def new_namespaces() -> None:
    """Own network, processes (of children), mounts and IPC; without being root, by way of a user namespace.

    Raises:
        OSError: the kernel or its administrator does not allow it.
    """
    uid, gid = os.geteuid(), os.getegid()
    names = [n for n in _CLONE if n != "user" or uid != 0]
    _call(_LIBC.unshare(sum(_CLONE[n] for n in names)), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call(_LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")


def read_only_everywhere() -> None:
    """All mounts of this namespace become read-only.

    Raises:
        OSError: the kernel is older than 5.12, or refuses.
    """
    attributes = struct.pack("=QQQQ", _RDONLY, 0, 0, 0)
    _call(
        _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)),
        "mount_setattr",
    )


def private_scratch(folder: str, size_b: int, n_files: int) -> None:
    """An empty tmpfs of a limited size and number of files on `folder`, only for this mount namespace.

    Raises:
        OSError: the kernel refuses.
    """
    options = f"size={size_b},nr_inodes={n_files},mode=1777".encode()
    _call(_LIBC.mount(b"scratch", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options), "mount tmpfs")


def landlock(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Close the file system but for these folders and files, for this process and its descendants.

    Returns:
        The kernel's version of landlock: from 4 on TCP is closed, from 6 on signals stay inside.

    Raises:
        OSError: the kernel has no landlock, or refuses.
    """
    version = _call(_LIBC.syscall(_SYS_LANDLOCK[0], None, 0, 1), "landlock_create_ruleset")
    rights = sum(bits for abi, bits in _ABI_RIGHTS.items() if abi <= version)
    fields = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    ruleset = struct.pack(f"={len(fields)}Q", *fields)
    rules = _call(_LIBC.syscall(_SYS_LANDLOCK[0], ruleset, len(ruleset), 0), "landlock_create_ruleset")
    try:
        for paths, allowed in ((readable, _READ), (writable, rights)):
            for path in paths:
                _allow(rules, path, allowed & rights)
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_LIBC.syscall(_SYS_LANDLOCK[2], rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)
    return version


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, place)
        _call(_LIBC.syscall(_SYS_LANDLOCK[1], rules, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def give_up_rights(uid: int) -> None:
    """As root: become a user that no one is, keep of root's rights only to read files, for Python's sake.

    Raises:
        OSError: the number is not mapped in this container, or the kernel refuses.
    """
    _LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    low = struct.pack("=III", 1 << _CAP_DAC_READ_SEARCH, 1 << _CAP_DAC_READ_SEARCH, 0)
    _call(_LIBC.capset(header, low + struct.pack("=III", 0, 0, 0)), "capset")
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
