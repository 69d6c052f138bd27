"""Tests a restriction from inside: the restricted process makes attempts, each of which the kernel must refuse."""

import ctypes
import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterable

from gvpo_trl.sandbox.kernel import libc

MAX_DESCRIPTORS = 64
"""Descriptors that a restricted process may have open at once."""
_PTRACE_SEIZE = 0x4206


def self_test(canary: str, layers: Iterable[str], kept_fds: Iterable[int], files: bool = True) -> list[str]:
    """Make every attempt in a restricted process, and return one line for each that was not refused.

    Args:
        canary: a file that the process must not be able to read.
        layers: what `restrict` returned; an attempt that none of these layers could refuse is not made.
        kept_fds: the descriptors that `restrict` was told to keep.
        files: whether `restrict` was told to leave any file readable.
    """
    in_force = {layer.partition("-")[0] for layer in layers}
    findings = [f"descriptor {fd} is open" for fd in range(4 * MAX_DESCRIPTORS) if fd not in kept_fds and _is_open(fd)]
    for what, refused_by, attempt in attempts(canary, os.getppid(), files):
        if not in_force.isdisjoint(refused_by):
            try:
                attempt()
            except PermissionError:
                continue
            except Exception as error:
                findings.append(f"{what}: not refused, but {type(error).__name__}: {error}")
            else:
                findings.append(f"{what}: worked")
    return findings


def attempts(canary: str, parent: int, files: bool = True) -> list[tuple[str, set[str], Callable[[], object]]]:
    """Return each attempt: its name, the layers of which one is enough to refuse it, and how to make it."""
    folder, calls, either = os.path.dirname(canary), {"seccomp"}, {"landlock", "seccomp"}
    if files:
        reading, look_ups, hidden = {"landlock"}, [], _unchanged
    else:
        reading, hidden = either, _refused_if_not_found
        look_ups = [(f"look up {canary}", calls, hidden(lambda: os.stat(canary)))]
    return [
        *look_ups,
        (f"read {canary}", reading, hidden(lambda: _read(canary))),
        (f"list {folder}", reading, hidden(lambda: os.listdir(folder))),
        ("read the parent's environment", reading, hidden(lambda: _read(f"/proc/{parent}/environ"))),
        ("reopen descriptors", reading, hidden(lambda: os.listdir("/proc/self/fd"))),
        ("write in the current folder", either, hidden(lambda: _write("."))),
        ("write in /tmp", either, hidden(lambda: _write("/tmp"))),
        (f"write in {folder}", either, hidden(lambda: _write(folder))),
        ("open a Unix socket", calls, lambda: socket.socket(socket.AF_UNIX).close()),
        ("open an Internet socket", calls, lambda: socket.socket(socket.AF_INET).close()),
        ("fork", calls, _fork),
        ("exec", calls, lambda: os.execv("/nonexistent", ["/nonexistent"])),
        ("signal the parent", calls, lambda: os.kill(parent, 0)),
        ("trace the parent", either, lambda: _trace(parent)),
        ("set a limit", calls, _set_a_limit),
    ]


def _unchanged(attempt: Callable[[], object]) -> Callable[[], object]:
    return attempt


def _refused_if_not_found(attempt: Callable[[], object]) -> Callable[[], object]:
    """Return the attempt with 'not found' turned into a refusal, because its path exists."""

    def attempt_and_translate() -> object:
        try:
            return attempt()
        except FileNotFoundError as error:
            raise PermissionError(str(error)) from error

    return attempt_and_translate


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
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
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _set_a_limit() -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
    except ValueError as error:  # Python raises this for EPERM here
        raise PermissionError(str(error)) from error
