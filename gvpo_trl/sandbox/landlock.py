"""Landlock: the kernel's own restriction of files, TCP and UDP, abstract sockets and signals, for one process."""

import os
import stat
import struct
from collections.abc import Iterable

from gvpo_trl.sandbox.kernel import syscall

# landlock_create_ruleset, _add_rule and _restrict_self have the same numbers on every architecture.
CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3


def restrict_files(abi: int, read_only: Iterable[str]) -> None:
    """Deny everything that this ABI of Landlock knows, except reading what lies below `read_only`."""
    # ABI 1 has 13 rights on files; later ones add moving between folders, truncation, ioctl on devices, sockets.
    files = (1 << 13 + (abi >= 2) + (abi >= 3) + (abi >= 5) + (abi >= 9)) - 1
    network = (0b11 if abi >= 4 else 0) | (0b1100 if abi >= 10 else 0)  # TCP, UDP: bind and connect
    scopes = 0b11 if abi >= 6 else 0  # abstract sockets and signals
    ruleset = syscall("landlock", CREATE_RULESET, struct.pack("=QQQ", files, network, scopes), 24, 0)
    for path in read_only:
        try:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        rights = _READ_FILE | _READ_DIR if stat.S_ISDIR(os.fstat(target).st_mode) else _READ_FILE
        syscall(f"landlock, {path}", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, target), 0)
        os.close(target)
    quiet = 1 if abi >= 7 else 0  # the self-test alone would fill the audit log
    syscall("landlock", _RESTRICT_SELF, ruleset, quiet)
    os.close(ruleset)
