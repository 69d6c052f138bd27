"""The seccomp filter of both architectures, run by an interpreter of its format, and the numbers of system calls."""

import os
import re
import struct
from pathlib import Path

import pytest

from gvpo_trl.sandbox import seccomp

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X86_ONLY = {"access", "alarm", "dup2", "epoll_wait", "lstat", "open", "poll", "readlink", "select", "stat", "time"}
"""Calls that newer architectures replace by one of the others."""
FULL = (1 << 64) - 1


def verdict(program: bytes, machine: str, number: int, *arguments: int) -> str:
    """Run a filter as the kernel does (Documentation/networking/filter.rst), for the instructions that it uses."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, AUDIT_ARCH.get(machine, 0x40000003), 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x06:
                return {
                    0x7FFF0000: "allow",
                    0x80000000: "kill",
                    0x50001: "EPERM",
                    0x50002: "ENOENT",
                    0x50026: "ENOSYS",
                }[value]
            case _:
                raise AssertionError(f"instruction {code:#x} is unknown to this test")


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_every_call_has_its_number(machine):
    numbers = seccomp.call_numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
    assert set(seccomp.call_numbers("x86_64")) - set(numbers) == (X86_ONLY if machine == "aarch64" else set())
    assert set(numbers) <= set(seccomp.call_numbers("x86_64"))
    assert set(seccomp.CONDITIONS) - set(numbers) <= X86_ONLY


@pytest.mark.parametrize(
    ("machine", "headers"),
    [
        ("x86_64", ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")),
        ("aarch64", ("/usr/include/asm-generic/unistd.h",)),
    ],
)
def test_the_numbers_are_those_of_the_kernel_s_headers(machine, headers):
    found = [path for path in headers if os.path.exists(path)]
    if not found:
        pytest.skip("the kernel's headers are not installed")
    text = Path(found[0]).read_text()
    # On 64 bits __NR_lseek, for one, is defined as __NR3264_lseek, and __NR_newfstatat as __NR3264_fstatat.
    defined = {name: value for name, value in re.findall(r"#define (__NR\w+) (\w+)", text) if value != name}
    for name, number in seccomp.call_numbers(machine).items():
        value = defined[f"__NR_{name}"]
        assert int(defined.get(value, value)) == number, name


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_the_filter_allows_the_table_and_nothing_else(machine):
    program, numbers = seccomp.filter_program(machine), seccomp.call_numbers(machine)
    free = {number for name, number in numbers.items() if name not in seccomp.CONDITIONS}
    for number in range(1024):
        expected = "allow" if number in free else "ENOSYS" if number == 435 else "EPERM"
        assert number in numbers.values() or verdict(program, machine, number, *[FULL] * 6) == expected
        assert number not in free or verdict(program, machine, number, *[FULL] * 6) == "allow"
    assert verdict(program, "i386", numbers["read"]) == "kill"
    assert verdict(program, {"x86_64": "aarch64", "aarch64": "x86_64"}[machine], numbers["read"]) == "kill"
    x32 = verdict(program, machine, 0x40000000 | numbers["read"])
    assert x32 == ("kill" if machine == "x86_64" else "EPERM")


CLOEXEC, HIGH, AT_CWD = 0o2000000, 1 << 32, -100 & FULL


@pytest.mark.parametrize("machine", AUDIT_ARCH)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("openat", (AT_CWD, 0x1000, os.O_RDONLY | CLOEXEC), "allow"),
        ("openat", (AT_CWD, 0x1000, os.O_RDONLY | CLOEXEC | 0o200000), "allow"),
        ("openat", (AT_CWD, 0x1000, os.O_WRONLY), "EPERM"),
        ("openat", (AT_CWD, 0x1000, os.O_RDWR | CLOEXEC), "EPERM"),
        ("openat", (AT_CWD, 0x1000, 3), "EPERM"),
        ("openat", (AT_CWD, 0x1000, os.O_RDONLY | os.O_CREAT), "EPERM"),
        ("openat", (AT_CWD, 0x1000, os.O_RDONLY | os.O_TRUNC), "EPERM"),
        ("openat", (AT_CWD, 0x1000, os.O_WRONLY | HIGH), "EPERM"),
        ("mmap", (0, 4096, 3, 0x22), "allow"),
        ("mmap", (0, 4096, 5, 0x2, 5), "allow"),
        ("mmap", (0, 4096, 5, 0x22), "EPERM"),
        ("mmap", (0, 4096, 7, 0x2, 5), "EPERM"),
        ("mprotect", (0x1000, 4096, 3), "allow"),
        ("mprotect", (0x1000, 4096, 5), "EPERM"),
        ("prlimit64", (0, 7, 0, 0x7F00_0000_1000), "allow"),
        ("prlimit64", (HIGH, 7, 0, 0x1000), "allow"),
        ("prlimit64", (1, 7, 0, 0x1000), "EPERM"),
        ("prlimit64", (0, 7, 0x1000, 0), "EPERM"),
        ("prlimit64", (0, 7, HIGH, 0), "EPERM"),
        ("sendto", (5, 0x1000, 10, 0x4000, 0, 0), "allow"),
        ("sendto", (5, 0x1000, 10, 0x4000, 0x1000, 110), "EPERM"),
        ("sendto", (5, 0x1000, 10, 0x4000, HIGH, 110), "EPERM"),
        ("socketpair", (1, 1 | CLOEXEC, 0), "allow"),
        ("socketpair", (1, 1 | CLOEXEC | 0o4000, 0), "allow"),
        ("socketpair", (1, 2, 0), "EPERM"),
        ("socketpair", (1, 5, 0), "EPERM"),
        ("socketpair", (2, 1, 0), "EPERM"),
        ("fcntl", (5, 1030, 3), "allow"),
        ("fcntl", (5, 4, 0o4000), "allow"),
        ("fcntl", (5, 8, 1), "EPERM"),
        ("fcntl", (5, 1026, 1), "EPERM"),
        ("ioctl", (5, 0x5421, 0x1000), "allow"),
        ("ioctl", (5, 0x5412, 0x1000), "EPERM"),
    ],
)
def test_the_filter_looks_at_arguments(machine, name, arguments, expected):
    program, number = seccomp.filter_program(machine), seccomp.call_numbers(machine)[name]
    assert verdict(program, machine, number, *arguments) == expected


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_without_files_no_call_opens_or_looks_up_a_path(machine):
    program, numbers = seccomp.filter_program(machine, files=False), seccomp.call_numbers(machine)
    whole = seccomp.filter_program(machine)
    for name, number in numbers.items():
        expected = "ENOENT" if name in seccomp.TAKE_PATHS else None
        for arguments in ((0,) * 6, (AT_CWD, 0x1000, os.O_RDONLY | CLOEXEC, 0x1000)):
            found = verdict(program, machine, number, *arguments)
            assert found == (expected or verdict(whole, machine, number, *arguments)), name


@pytest.mark.parametrize(("number", "expected"), [("clone3", "ENOSYS"), ("setrlimit", "EPERM"), ("socket", "EPERM")])
def test_what_is_refused_by_name(number, expected):
    for machine, numbers in {
        "x86_64": {"clone3": 435, "setrlimit": 160, "socket": 41},
        "aarch64": {"clone3": 435, "setrlimit": 164, "socket": 198},
    }.items():
        assert verdict(seccomp.filter_program(machine), machine, numbers[number]) == expected
