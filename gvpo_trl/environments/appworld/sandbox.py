"""Restricts the process that runs agent code, right after its fork: Linux on x86_64 and aarch64.

Standard library only. `docs/sandbox.md` says what each layer shuts, what none does, and why no library is used.
"""

import contextlib
import ctypes
import errno
import functools
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NOBODY = 65534
"""User and group that own nothing, for an interpreter that was forked by root."""
MAX_DESCRIPTORS = 64

# landlock_create_ruleset, _add_rule and _restrict_self have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_PTRACE_SEIZE = 0x4206
_CAPABILITY_VERSION_3, _CAP_SETGID, _CAP_SETUID = 0x20080522, 6, 7
_LANDLOCK_HELP = "a profile that allows landlock_create_ruleset, landlock_add_rule and landlock_restrict_self"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = _libc.ptrace.restype = ctypes.c_long
_kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Support:
    """What this machine offers."""

    landlock_abi: int
    """Version of the kernel's Landlock; 0 for none."""
    seccomp: bool
    setuid: bool
    """Whether this process may become another user. An additional layer: `level` does not count it."""
    landlock_errno: int = 0
    """Why there is no Landlock, as the kernel's error number."""

    @property
    def level(self) -> str:
        """`full` when files (Landlock) and system calls (seccomp) are restricted, `partial` with one, else `none`."""
        return ("none", "partial", "full")[bool(self.landlock_abi) + self.seccomp]

    @property
    def layers(self) -> tuple[str, ...]:
        """What `restrict` puts in force."""
        landlock = [f"landlock-{self.landlock_abi}"] if self.landlock_abi else []
        return ("rlimits", *landlock, *["setuid"] * self.setuid, *["seccomp"] * self.seccomp)

    @property
    def missing(self) -> tuple[str, ...]:
        """One line for each thing that `full` needs and that is not there, with the remedy."""
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
        abi, refusal = _syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, 1), 0
    except OSError as error:
        abi, refusal = 0, error.errno
    # A kernel with filters follows the pointer before all else, and this one leads nowhere.
    failed = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None)
    seccomp = failed < 0 and ctypes.get_errno() == errno.EFAULT and os.uname().machine in _ARCHITECTURES
    if seccomp:
        filter_program(os.uname().machine)  # a host that probes before it forks makes it once
    return Support(abi, seccomp, _may_become_nobody(), refusal)


def restrict(*, keep_fds: Iterable[int], read_only: Iterable[str], memory_bytes: int, parent: int) -> tuple[str, ...]:
    """Give up, for good, all that agent code has no need of. Call it right after the fork.

    Args:
        keep_fds: descriptors that stay open; all others are closed, also 0, 1 and 2.
        read_only: files and folders that can be read from now on, with all that lies below; those that are not
            there are passed over. Nothing can be written anywhere.
        memory_bytes: limit of the address space; 0 for none.
        parent: process that this one must not outlive.

    Returns:
        The layers in force: `rlimits`, `landlock-<ABI>`, `setuid`, `seccomp`, without those that this machine lacks.

    Raises:
        OSError: a layer that is there could not be put in force, or the parent is gone. End the process then.
        RuntimeError: the process has more than one thread; Landlock and seccomp would cover this one only.
    """
    global _kept
    if isinstance(read_only, str | bytes):
        raise TypeError(f"read_only={read_only!r} must be a list of paths")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the process to restrict has {threads} threads, it must have one: call right after a fork")
    support = probe()
    _kept = frozenset(keep_fds)
    _close_all_but(_kept)
    _set_limits(memory_bytes)
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    if support.landlock_abi:
        _restrict_files(support.landlock_abi, read_only)
    if support.setuid:
        _become_nobody()
    _drop_capabilities()
    _prctl("death signal", _PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user takes it back, so it comes after
    if os.getppid() != parent:
        raise ProcessLookupError(errno.ESRCH, f"the parent, process {parent}, is gone")
    _prctl("not dumpable", _PR_SET_DUMPABLE, 0)
    if support.seccomp:
        program = filter_program(os.uname().machine)
        pointer = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
        _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("@HP", len(program) // 8, pointer))
    return support.layers


def _syscall(what: str, number: int, *arguments) -> int:
    result = _libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(what: str, option: int, *arguments) -> None:
    padded = (*arguments, 0, 0, 0)[:4]
    if _libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)) < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _close_all_but(kept: frozenset[int]) -> None:
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
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


def _restrict_files(abi: int, read_only: Iterable[str]) -> None:
    """Landlock: all that this ABI knows is denied, but reading what lies below `read_only`."""
    # ABI 1 has 13 rights on files; later ones add moving between folders, truncation, ioctl on devices, sockets.
    files = (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5) + (abi >= 9)) - 1
    network = (0b11 if abi >= 4 else 0) | (0b1100 if abi >= 10 else 0)  # TCP, UDP: bind and connect
    scopes = 0b11 if abi >= 6 else 0  # abstract sockets and signals
    ruleset = _syscall("landlock", _CREATE_RULESET, struct.pack("=QQQ", files, network, scopes), 24, 0)
    for path in read_only:
        try:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        rights = _READ_FILE | _READ_DIR if stat.S_ISDIR(os.fstat(target).st_mode) else _READ_FILE
        _syscall(f"landlock, {path}", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, target), 0)
        os.close(target)
    quiet = 1 if abi >= 7 else 0  # the self-test alone would fill the audit log
    _syscall("landlock", _RESTRICT_SELF, ruleset, quiet)
    os.close(ruleset)


def _may_become_nobody() -> bool:
    header, data = struct.pack("=II", _CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
    if _libc.capget(header, data) < 0:
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
    if _libc.capset(header, nothing) < 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


# What the interpreter may ask of the kernel. Everything else is refused with EPERM.
# Each entry: the call, its number on x86_64, its number on aarch64 ("-": it has none).
_CALLS = """
read 0 63, readv 19 65, pread64 17 67, write 1 64, writev 20 66, lseek 8 62, close 3 57
dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22
socketpair 53 199, sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockopt 55 209
getsockname 51 204, getpeername 52 205

openat 257 56, open 2 -, newfstatat 262 79, fstat 5 80, stat 4 -, lstat 6 -, access 21 -, faccessat 269 48
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17

brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128
setitimer 38 103, getitimer 36 102, alarm 37 -, nanosleep 35 101, clock_nanosleep 230 115
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -

getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177
uname 63 160, getrandom 318 278, getrusage 98 165, times 100 153, prlimit64 302 261, sched_getaffinity 204 123
sched_yield 24 124, futex 202 98, exit 60 93, exit_group 231 94
"""
_CLONE3 = 435
"""The same on both. The C library tries `clone` where this one is not there, so it is told that it is not."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of the table, the kernel's name for the architecture (AUDIT_ARCH)."""

_INT, _POINTER = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_WRITES = 0o3 | os.O_CREAT | os.O_TRUNC
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_SOCKET_FLAGS = 0o2004000
"""SOCK_CLOEXEC | SOCK_NONBLOCK."""
_CONDITIONS = {
    "openat": [[(2, _WRITES, 0)]],
    "open": [[(1, _WRITES, 0)]],
    # No machine code but what permitted files hold.
    "mmap": [[(2, _PROT_EXEC, 0)], [(2, _PROT_WRITE, 0), (3, _MAP_ANONYMOUS, 0)]],
    "mprotect": [[(2, _PROT_EXEC, 0)]],
    "prlimit64": [[(0, _INT, 0), (2, _POINTER, 0)]],
    "sendto": [[(4, _POINTER, 0)]],
    "socketpair": [[(0, _INT, socket.AF_UNIX), (1, _INT & ~_SOCKET_FLAGS, socket.SOCK_STREAM)]],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; others lock files or send signals.
    "fcntl": [[(1, _INT, command)] for command in (0, 1, 2, 3, 4, 1030)],
    # TCGETS, FIONCLEX, FIOCLEX, FIONBIO: what Python asks of what it opens.
    "ioctl": [[(1, _INT, request)] for request in (0x5401, 0x5450, 0x5451, 0x5421)],
}
"""Call -> alternatives, each a list of (argument, mask, value): `argument & mask == value` must hold for all."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF's words for these
_ALLOW, _KILL, _REFUSE, _PRETEND_ABSENCE = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def call_numbers(machine: str) -> dict[str, int]:
    """Allowed call -> its number on `machine`, `x86_64` or `aarch64`."""
    column = _ARCHITECTURES[machine][0]
    rows = [entry.split() for line in _CALLS.splitlines() for entry in line.split(",") if entry]
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


@functools.cache
def filter_program(machine: str) -> bytes:
    """The seccomp filter of `machine` in the kernel's format: 8 bytes an instruction."""
    x86_64, architecture = machine == "x86_64", _ARCHITECTURES[machine][1]
    program = [_step(_LOAD, 4), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if x86_64:  # the numbers of its second, 32-bit interface
        program += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]
    program += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _PRETEND_ABSENCE)]
    for name, number in call_numbers(machine).items():
        if name in _CONDITIONS:
            checks = [step for conditions in _CONDITIONS[name] for step in _all_of(conditions)]
            checks.append(_step(_RETURN, _REFUSE))
        else:
            checks = [_step(_RETURN, _ALLOW)]
        program += [_step(_EQUAL, number, 0, len(checks)), *checks]
    return b"".join([*program, _step(_RETURN, _REFUSE)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _all_of(conditions: list[tuple[int, int, int]]) -> list[bytes]:
    """Allow if all conditions hold, else go on behind these instructions. BPF sees an argument as two halves."""
    program = [_step(_RETURN, _ALLOW)]
    for argument, mask, value in reversed(conditions):
        for half in (0, 1):
            if part := mask >> 32 * half & _INT:
                load = [_step(_LOAD, 16 + 8 * argument + 4 * half), _step(_AND, part)]
                program = [*load, _step(_EQUAL, value >> 32 * half & _INT, 0, len(program)), *program]
    return program


def self_test(planted: str, layers: Iterable[str]) -> list[str]:
    """Try, in a restricted process, what must fail; one line for each thing that did not fail as it must.

    Args:
        planted: a file with ground truth.
        layers: what `restrict` returned; what no layer in force could shut is not tried.
    """
    in_force = {layer.partition("-")[0] for layer in layers}
    findings = [f"descriptor {fd} is open" for fd in range(4 * MAX_DESCRIPTORS) if fd not in _kept and _is_open(fd)]
    for what, shut_by, attempt in _attempts(planted, os.getppid()):
        if not in_force.isdisjoint(shut_by):
            try:
                attempt()
            except PermissionError:
                continue
            except Exception as error:
                findings.append(f"{what}: not refused, but {type(error).__name__}: {error}")
            else:
                findings.append(f"{what}: worked")
    return findings


def _attempts(planted: str, parent: int) -> list[tuple[str, set[str], Callable[[], object]]]:
    """What must fail: its name, the layers of which one is enough, how to try it."""
    folder, files, calls, either = os.path.dirname(planted), {"landlock"}, {"seccomp"}, {"landlock", "seccomp"}
    return [
        (f"read {planted}", files, lambda: _read(planted)),
        (f"list {folder}", files, lambda: os.listdir(folder)),
        ("read the parent's environment", files, lambda: _read(f"/proc/{parent}/environ")),
        ("reopen descriptors", files, lambda: os.listdir("/proc/self/fd")),
        ("write in the current folder", either, lambda: _write(".")),
        ("write in /tmp", either, lambda: _write("/tmp")),
        (f"write in {folder}", either, lambda: _write(folder)),
        ("open a Unix socket", calls, lambda: socket.socket(socket.AF_UNIX).close()),
        ("open an Internet socket", calls, lambda: socket.socket(socket.AF_INET).close()),
        ("fork", calls, _fork),
        ("exec", calls, lambda: os.execv("/nonexistent", ["/nonexistent"])),
        ("signal the parent", calls, lambda: os.kill(parent, 0)),
        ("trace the parent", either, lambda: _trace(parent)),
        ("set a limit", calls, _set_a_limit),
    ]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _write(folder: str) -> None:
    path = os.path.join(folder, f"self-test-{os.getpid()}")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    os.unlink(path)


def _fork() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _trace(pid: int) -> None:
    if _libc.ptrace(_PTRACE_SEIZE, pid, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _set_a_limit() -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
    except ValueError as error:  # Python's name for EPERM here
        raise PermissionError(str(error)) from error
