"""What a machine offers for the restriction, and what it lacks."""

import errno
import socket
import subprocess
import sys

import pytest

from gvpo_trl import sandbox


def test_probing_restricts_nothing():
    assert sandbox.probe() == sandbox.probe()
    socket.socket(socket.AF_UNIX).close()
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0


@pytest.mark.parametrize(
    ("support", "level", "layers", "remedies"),
    [
        (sandbox.Support(7, True, True), "full", ("rlimits", "landlock-7", "setuid", "seccomp"), []),
        (sandbox.Support(1, True, False), "full", ("rlimits", "landlock-1", "seccomp"), []),
        (sandbox.Support(1, False, False), "partial", ("rlimits", "landlock-1"), ["CONFIG_SECCOMP_FILTER"]),
        (sandbox.Support(0, True, False, errno.ENOSYS), "partial", ("rlimits", "seccomp"), ["Linux 5.13"]),
        (sandbox.Support(0, True, True, errno.EOPNOTSUPP), "partial", ("rlimits", "setuid", "seccomp"), ["lsm="]),
        (sandbox.Support(0, False, True, errno.EPERM), "none", ("rlimits", "setuid"), ["container's", "x86_64"]),
    ],
)
def test_the_level_and_what_is_missing(support, level, layers, remedies):
    assert (support.level, support.layers) == (level, layers)
    assert len(support.missing) == len(remedies)
    for line, remedy in zip(support.missing, remedies, strict=True):
        assert remedy in line
