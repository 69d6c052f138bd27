"""Restricts a process right after its fork, in layers, on Linux on x86_64 and aarch64.

`docs/sandbox.md` says what each layer refuses, what no layer refuses, and why no library is used.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from gvpo_trl.sandbox import landlock, seccomp
from gvpo_trl.sandbox.kernel import libc, prctl, syscall
from gvpo_trl.sandbox.self_test import MAX_DESCRIPTORS

NOBODY = 65534
"""User and group that own nothing; a process that root forked becomes them."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3, _CAP_SETGID, _CAP_SETUID = 0x20080522, 6, 7
_LANDLOCK_HELP = "a profile that allows landlock_create_ruleset, landlock_add_rule and landlock_restrict_self"


@dataclass(frozen=True)
class Support:
    """What this machine offers."""

    landlock_abi: int
    """Version of the kernel's Landlock; 0 for none."""
    seccomp: bool
    setuid: bool
    """Whether this process may become another user. This layer is an additional one that `level` does not count."""
    landlock_errno: int = 0
    """The kernel's error number if there is no Landlock, which says why."""

    @property
    def level(self) -> str:
        """`full` when files (Landlock) and system calls (seccomp) are restricted, `partial` with one, else `none`."""
        return ("none", "partial", "full")[bool(self.landlock_abi) + self.seccomp]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that `restrict` puts in force."""
        files = [f"landlock-{self.landlock_abi}"] if self.landlock_abi else []
        return ("rlimits", *files, *["setuid"] * self.setuid, *["seccomp"] * self.seccomp)

    @property
    def missing(self) -> tuple[str, ...]:
        """One line, with the remedy, for each thing that level `full` needs and this machine lacks."""
        lines = []
        if not self.landlock_abi and self.landlock_errno == errno.EOPNOTSUPP:
            lines.append("Landlock is switched off: add landlock to lsm= on the kernel's command line")
        elif not self.landlock_abi and self.landlock_errno == errno.EPERM:
            lines.append(f"Landlock is refused, by a container's seccomp profile: use {_LANDLOCK_HELP}")
        elif not self.landlock_abi:
            lines.append(f"no Landlock: use Linux 5.13 or newer, and in a container {_LANDLOCK_HELP}")
        if not self.seccomp:
            lines.append("no seccomp filter: use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64")
        return tuple(lines)


def probe() -> Support:
    """Find out what this machine offers, without restricting or forking anything."""
    if not sys.platform.startswith("linux"):
        return Support(0, False, False, errno.ENOSYS)
    try:
        abi, refusal = syscall("landlock_create_ruleset", landlock.CREATE_RULESET, None, 0, 1), 0
    except OSError as error:
        abi, refusal = 0, error.errno
    # A kernel with filters first follows the pointer, and fails with EFAULT because it is null.
    failed = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None)
    filters = failed < 0 and ctypes.get_errno() == errno.EFAULT and os.uname().machine in seccomp.ARCHITECTURES
    if filters:
        for files in (True, False):  # cached, so that children inherit it
            seccomp.filter_program(os.uname().machine, files)
    return Support(abi, filters, _may_become_nobody(), refusal)


def restrict(*, keep_fds: Iterable[int], read_only: Iterable[str], memory_bytes: int, parent: int) -> tuple[str, ...]:
    """Give up, for good, everything that untrusted code does not need. Call this right after the fork.

    Args:
        keep_fds: descriptors that stay open; all others are closed, also 0, 1 and 2.
        read_only: files and folders that stay readable, with all that lies below them; missing ones are ignored.
            Nothing can be written anywhere. If this is empty, seccomp answers that no path exists: no file can be
            opened, and neither sizes nor dates of files can be looked up.
        memory_bytes: limit of the address space; 0 for none.
        parent: id of the process that this one must not outlive.

    Returns:
        Those of the layers `rlimits`, `landlock-<ABI>`, `setuid`, `seccomp` that this machine has.

    Raises:
        OSError: a layer could not be put in force, or the parent is gone. End the process then.
        RuntimeError: the process has more than one thread; Landlock and seccomp would cover this one only.
    """
    if isinstance(read_only, str | bytes):
        raise TypeError(f"read_only={read_only!r} must be a list of paths")
    read_only = tuple(read_only)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the process to restrict has {threads} threads, it must have one: call right after a fork")
    support = probe()
    _close_all_but(frozenset(keep_fds))
    _set_limits(memory_bytes)
    prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    if support.landlock_abi:
        landlock.restrict_files(support.landlock_abi, read_only)
    if support.setuid:
        _become_nobody()
    _drop_capabilities()
    prctl("death signal", _PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it, so it comes after
    if os.getppid() != parent:
        raise ProcessLookupError(errno.ESRCH, f"the parent, process {parent}, is gone")
    prctl("not dumpable", _PR_SET_DUMPABLE, 0)
    if support.seccomp:
        program = seccomp.filter_program(os.uname().machine, files=bool(read_only))
        pointer = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
        prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("@HP", len(program) // 8, pointer))
    return support.layers


def _close_all_but(kept: frozenset[int]) -> None:
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the listing itself had a descriptor
            os.close(fd)


def _set_limits(memory_bytes: int) -> None:
    limits = dict.fromkeys(("NPROC", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"), 0) | {"NOFILE": MAX_DESCRIPTORS}
    if memory_bytes > 0:
        limits["AS"] = memory_bytes
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _may_become_nobody() -> bool:
    header, data = struct.pack("=II", _CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
    if libc.capget(header, data) < 0:
        return False
    effective = struct.unpack_from("=I", data)[0]
    if not (effective >> _CAP_SETUID & effective >> _CAP_SETGID & 1):
        return False
    # Root of a user namespace may be the only user there.
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}", encoding="ascii") as file:
            ranges = [line.split() for line in file]
        if not any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in ranges):
            return False
    with open("/proc/self/setgroups", encoding="ascii") as file:
        return file.read().strip() == "allow"


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _drop_capabilities() -> None:
    header, nothing = struct.pack("=II", _CAPABILITY_VERSION_3, 0), bytes(24)
    if libc.capset(header, nothing) < 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")
