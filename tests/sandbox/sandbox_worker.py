"""Run by a plain interpreter: runs pieces of code, each in a fork of this process that restricts itself first, or not.

Standard input holds one JSON object: `boot` (what loads the package), `user` (`root` or `nobody`), `restricted`,
`lacks` (layers to go without, as on a kernel that has none), `folder` (the current one; it holds `planted`, the file
that nobody may read, and `permitted`, a folder that can be read), `files` (whether anything can be read) and
`snippets` (name -> code). Standard output gets one JSON object, name -> what became of the code: null when it ended,
the exception that it raised, or `signal N`.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import importlib.util
import json
import mmap
import os
import runpy
import select
import signal
import socket
import sys
import threading

PR_SET_DUMPABLE, PR_SET_PTRACER, ANY = 4, 0x59616D61, -1
DEADLINE_S = 60
MEMORY_BYTES = 1 << 30
IMPORTED = (
    "asyncio",
    "datetime",
    "decimal",
    "pathlib",
    "random",
    "re",
    "resource",
    "tempfile",
    "time",
    "uuid",
    "zoneinfo",
)
"""What the code needs and could not import any more: the interpreter may lie where nobody can read."""


def outcome(code: str, namespace: dict) -> str | None:
    try:
        exec(code, namespace)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def run(code: str, work: dict, sandbox, namespace: dict, kept: set[int]) -> str | None:
    """Fork, restrict where asked, run the code; what became of it."""
    parent, (ours, theirs) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        if work["restricted"]:
            namespace["kept"] = kept | {0, 1, 2, theirs}
            readable = [f"{work['folder']}/permitted", f"{work['folder']}/missing", "/dev/null", "/dev/urandom"]
            namespace["layers"] = sandbox.restrict(
                keep_fds=namespace["kept"],
                read_only=readable if work["files"] else (),
                memory_bytes=MEMORY_BYTES,
                parent=parent,
            )
        os.write(theirs, json.dumps(outcome(code, namespace | {"pipe": theirs})).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        ended = select.select([file], [], [], DEADLINE_S)[0]
        if not ended:
            os.kill(pid, signal.SIGKILL)
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else f"signal {os.waitstatus_to_exitcode(status)}"


def main() -> None:
    work = json.load(sys.stdin)
    runpy.run_path(work["boot"])["load_package"]()
    from gvpo_trl import sandbox

    support = sandbox.probe()
    for layer, nothing in {"landlock_abi": 0, "seccomp": False, "setuid": False}.items():
        if layer.partition("_")[0] in work["lacks"]:
            support = dataclasses.replace(support, **{layer: nothing})
    if work["lacks"]:
        sandbox.restriction.probe = lambda: support
    for name in IMPORTED:
        importlib.import_module(name)
    libc = ctypes.CDLL(None, use_errno=True)
    if work["user"] == "nobody":
        os.setgroups([])
        os.setgid(sandbox.NOBODY)
        os.setuid(sandbox.NOBODY)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as it is for a process that was never root
    with contextlib.suppress(OSError):
        libc.prctl(PR_SET_PTRACER, ctypes.c_long(ANY), 0, 0, 0)
    os.chdir(work["folder"])
    sys.path.insert(0, f"{work['folder']}/permitted")
    open(f"deleted-{os.getpid()}", "w").close()
    server, datagram = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    server.bind(f"{os.getpid()}.sock")
    planted = f"{work['folder']}/planted"
    namespace = {
        "ctypes": ctypes,
        "datagram": datagram,
        "fcntl": fcntl,
        "kept": (),
        "folder": work["folder"],
        "inherited": os.open(planted, os.O_RDWR),
        "libc": libc,
        "mmap": mmap,
        "os": os,
        "parent": os.getpid(),
        "planted": planted,
        "sandbox": sandbox,
        "server": server.getsockname(),
        "signal": signal,
        "socket": socket,
        "sys": sys,
        "threading": threading,
    }
    kept = {datagram.fileno()}
    results = {name: run(code, work, sandbox, namespace, kept) for name, code in work["snippets"].items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
