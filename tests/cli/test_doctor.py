"""`gvpo-trl doctor`: what it says about the sandbox, on this machine and in a container that refuses a part of it."""

import errno
import subprocess
import sys

import pytest

from gvpo_trl import sandbox
from gvpo_trl.cli.doctor import State, examine

IN_A_CONTAINER = """
import os, struct, sys, ctypes
from gvpo_trl.sandbox import kernel
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, 444), (RETURN, 0, 0, 0x50000 | int(sys.argv[1])), (RETURN, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
kernel.prctl("no_new_privs", 38, 1)
kernel.prctl("filter", 22, 2, struct.pack("@HP", len(steps), ctypes.addressof(program)))
from gvpo_trl.cli import doctor
print(doctor.render(doctor.examine()))
"""
"""Runs `doctor` behind a seccomp filter that refuses Landlock's first system call (444) with the error in argv."""


def test_the_sandbox_of_this_machine():
    (finding,) = [finding for finding in examine() if finding.name == "sandbox"]
    support = sandbox.probe()
    assert finding.found.startswith(f"{support.level} (rlimits")
    assert all(layer in finding.found for layer in support.layers)
    assert (finding.state, finding.remedy) == (State.OK, None) or support.level != "full"


@pytest.mark.skipif(not sandbox.probe().seccomp, reason="this kernel has no filters")
@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (errno.EPERM, "a container's seccomp profile: use a profile that allows landlock_create_ruleset"),
        (errno.ENOSYS, "use Linux 5.13 or newer, and in a container a profile that allows landlock_create_ruleset"),
        (errno.EOPNOTSUPP, "add landlock to lsm= on the kernel's command line"),
    ],
)
def test_where_landlock_is_refused_the_remedy_is_named(refusal, remedy):
    command = [sys.executable, "-c", IN_A_CONTAINER, str(refusal)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  --  sandbox")]
    assert "partial (rlimits" in line and "agent code is not shut in" in line and "landlock" not in line
    (help_line,) = [line for line in done.stdout.splitlines() if line.startswith("  sandbox")]
    assert remedy in help_line
