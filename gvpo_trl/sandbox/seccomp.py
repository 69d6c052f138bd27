"""seccomp: a filter that allows a list of system calls and refuses all others."""

import errno
import functools
import os
import socket
import struct

# The system calls that a restricted process may make. The kernel refuses every other one with EPERM.
# An entry holds a call, its number on x86_64 and its number on aarch64; "-" means that there is no such call.
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
"""Its number on both machines. The filter answers that there is no such call, so the C library uses `clone`."""
TAKE_PATHS = (
    *("open", "openat"),
    *("stat", "lstat", "newfstatat", "access", "faccessat", "faccessat2", "readlink", "readlinkat"),
)
"""Calls that take a path. Landlock restricts the first two; the others tell whether a file exists, and its size."""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Maps a machine to its column of the table and the kernel's name for its architecture (AUDIT_ARCH)."""

_INT, _POINTER = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_WRITES = 0o3 | os.O_CREAT | os.O_TRUNC
_PROT_WRITE, _PROT_EXEC, _MAP_ANONYMOUS = 2, 4, 0x20
_SOCKET_FLAGS = 0o2004000
"""SOCK_CLOEXEC | SOCK_NONBLOCK."""
CONDITIONS = {
    "openat": [[(2, _WRITES, 0)]],
    "open": [[(1, _WRITES, 0)]],
    # Memory is executable only if it maps a permitted file.
    "mmap": [[(2, _PROT_EXEC, 0)], [(2, _PROT_WRITE, 0), (3, _MAP_ANONYMOUS, 0)]],
    "mprotect": [[(2, _PROT_EXEC, 0)]],
    "prlimit64": [[(0, _INT, 0), (2, _POINTER, 0)]],
    "sendto": [[(4, _POINTER, 0)]],
    "socketpair": [[(0, _INT, socket.AF_UNIX), (1, _INT & ~_SOCKET_FLAGS, socket.SOCK_STREAM)]],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Other commands lock files or send signals.
    "fcntl": [[(1, _INT, command)] for command in (0, 1, 2, 3, 4, 1030)],
    # TCGETS, FIONCLEX, FIOCLEX, FIONBIO, which Python uses on files that it opens.
    "ioctl": [[(1, _INT, request)] for request in (0x5401, 0x5450, 0x5451, 0x5421)],
}
"""Maps a call to lists of (argument, mask, value). In one list, `argument & mask == value` must hold for all."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # codes of BPF's instructions
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x50000
_REFUSE, _PRETEND_ABSENCE, _FIND_NOTHING = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS, _FAIL | errno.ENOENT


def call_numbers(machine: str) -> dict[str, int]:
    """Map each allowed call to its number on `machine`, `x86_64` or `aarch64`."""
    column = ARCHITECTURES[machine][0]
    rows = [entry.split() for line in _CALLS.splitlines() for entry in line.split(",") if entry]
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


@functools.cache
def filter_program(machine: str, files: bool = True) -> bytes:
    """Return the seccomp filter of `machine` in the kernel's format: 8 bytes an instruction.

    Args:
        machine: `x86_64` or `aarch64`.
        files: whether files can be opened and looked up. Else the kernel finds no file at any path.
    """
    x86_64, architecture = machine == "x86_64", ARCHITECTURES[machine][1]
    program = [_step(_LOAD, 4), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if x86_64:  # numbers of the second, 32-bit interface are refused
        program += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]
    program += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _PRETEND_ABSENCE)]
    for name, number in call_numbers(machine).items():
        if not files and name in TAKE_PATHS:
            checks = [_step(_RETURN, _FIND_NOTHING)]
        elif name in CONDITIONS:
            checks = [step for conditions in CONDITIONS[name] for step in _all_of(conditions)]
            checks.append(_step(_RETURN, _REFUSE))
        else:
            checks = [_step(_RETURN, _ALLOW)]
        program += [_step(_EQUAL, number, 0, len(checks)), *checks]
    return b"".join([*program, _step(_RETURN, _REFUSE)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _all_of(conditions: list[tuple[int, int, int]]) -> list[bytes]:
    """Allow the call if all conditions hold, else continue after this code. BPF loads an argument in halves."""
    program = [_step(_RETURN, _ALLOW)]
    for argument, mask, value in reversed(conditions):
        for half in (0, 1):
            if part := mask >> 32 * half & _INT:
                load = [_step(_LOAD, 16 + 8 * argument + 4 * half), _step(_AND, part)]
                program = [*load, _step(_EQUAL, value >> 32 * half & _INT, 0, len(program)), *program]
    return program
