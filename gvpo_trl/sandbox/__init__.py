"""Restricts a process before it runs untrusted code. This package knows nothing of AppWorld.

Any Python interpreter on Linux runs it; it imports the standard library alone. `engine/agents` restricts each of its
interpreters with it, and `gvpo-trl doctor` asks it what this machine's kernel offers.
"""

from gvpo_trl.sandbox.restriction import NOBODY, Support, probe, restrict
from gvpo_trl.sandbox.self_test import MAX_DESCRIPTORS, self_test

__all__ = ["MAX_DESCRIPTORS", "NOBODY", "Support", "probe", "restrict", "self_test"]
