"""System calls whose errors are raised as exceptions."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.ptrace.restype = ctypes.c_long


def syscall(what: str, number: int, *arguments) -> int:
    """Make a system call and return its result.

    Raises:
        OSError: the kernel refused it; the message begins with `what`.
    """
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(what: str, option: int, *arguments) -> None:
    """Call `prctl`; arguments that are not given are 0.

    Raises:
        OSError: the kernel refused it; the message begins with `what`.
    """
    padded = (*arguments, 0, 0, 0)[:4]
    if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)) < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
