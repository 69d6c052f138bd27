"""A warm process that forks a child per request. The hosts of worlds and of agents are such processes.

The trainer holds the other end of one control socket. It asks for a child with `spawn`, which hands over the socket on
which that child talks to the trainer directly, and ends a child with `reap`. The server answers at once and runs no
work itself, so a child that hangs delays no other.

No process is left behind. Children die with the server (death signal). The server ends when the control socket closes
or the trainer's process is gone. It adopts the orphans of its children, and finds and kills them.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from gvpo_trl.environments.appworld.wire import frames

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25
HUGE_PAGE = 2 * 1024 * 1024
MACHINERY_EXIT = 70
"""Exit status of a child whose own code raised, and not the agent's."""
PF_EXITING = 4
_libc = ctypes.CDLL(None, use_errno=True)
_exit = os._exit
AnyConfig = TypeVar("AnyConfig")


def read_config(kind: type[AnyConfig]) -> AnyConfig:
    """Take the configuration out of the environment variable `GVPO_HOST` and fill the dataclass `kind` from it.

    Values that `kind` has no field for are ignored.
    """
    given = json.loads(os.environ.pop("GVPO_HOST"))
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)})


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent_thread() -> None:
    """Take back `die_with_parent`, for a parent whose starting thread may end before its process."""
    _libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def volunteer_for_oom_killer() -> None:
    """Have the kernel end this process before others when the machine runs out of memory.

    The trainer and the hosts hold the work of many episodes, and a child the work of one.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def use_huge_pages() -> None:
    """Have the kernel map this process's memory in pages of 2 MiB, so that a fork copies few page tables.

    A child that writes to such a page gets small pages of its own. Kernels before 6.1 do not know the request.
    """
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for addresses, access, _, _, _, *name in regions:
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def run(warm_up: Callable[[], dict], children: dict[str, Callable[..., None]]) -> None:
    """Warm up, tell the trainer, then fork a child per request until the trainer is gone.

    The command line holds the number of the control descriptor and the trainer's process id. A child calls
    `children[kind](*sockets, request)`.
    """
    control_fd, trainer = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(trainer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        facts = warm_up()
        _wait_until_single_threaded()
    except BaseException:
        frames.send_control(control, {"ready": False, "error": traceback.format_exc()[-8000:]})
        raise
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outlive_parent_thread()
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages that children share
    use_huge_pages()
    frames.send_control(control, {"ready": True, **facts})
    _Server(control, trainer, children).serve()


def _wait_until_single_threaded() -> None:
    # A thread that was joined may stay in the kernel's list for a moment.
    for _ in range(200):
        if len(os.listdir("/proc/self/task")) == 1:
            return
        select.select([], [], [], 0.01)
    raise RuntimeError("other threads are alive after the warm-up: forking is not safe")


class _Server:
    def __init__(self, control: socket.socket, trainer: int, children: dict[str, Callable]) -> None:
        self.control = control
        self.children = children
        self.trainer_fd = os.pidfd_open(trainer)
        self.pids: dict[int, int] = {}  # request id -> pid of a child that is not reaped yet
        self.statuses: dict[int, int] = {}  # request id -> wait status of a child that ended by itself

    def serve(self) -> None:
        try:
            while True:
                ready, _, _ = select.select([self.control, self.trainer_fd], [], [], 0.5)
                if self.trainer_fd in ready:
                    return
                if self.control in ready:
                    self.answer()
                self.collect()
        except frames.ChannelClosed:
            pass
        finally:
            for request_id in list(self.pids):
                self.kill(request_id)
            self.kill_strays()
            os._exit(0)

    def answer(self) -> None:
        message, fds = frames.receive_control(self.control)
        if message["op"] == "spawn":
            reply = self.spawn(message, fds)
        else:
            assert message["op"] == "reap", "the trainer's side sends these two"
            status, killed = self.kill(message["child"])
            reply = {"status": status, "killed": killed}
        frames.send_control(self.control, reply | {"id": message["id"]})

    def spawn(self, message: dict, fds: list[int]) -> dict:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid, failure = -1, f"cannot fork: {error}"
        if pid:
            for fd in fds:
                os.close(fd)
            if pid < 0:
                return {"ok": False, "error": failure}
            self.pids[message["id"]] = pid
            return {"ok": True, "pid": pid}
        try:
            os.setsid()
            die_with_parent(server)
            volunteer_for_oom_killer()
            self.control.close()
            os.close(self.trainer_fd)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.children[message["kind"]](*(socket.socket(fileno=fd) for fd in fds), message)
        except BaseException:
            try:
                traceback.print_exc()
            finally:  # agent code may have broken what prints
                _exit(MACHINERY_EXIT)
        _exit(0)

    def kill(self, request_id: int) -> tuple[int | None, bool]:
        """End a child and all that it started.

        Returns:
            The child's wait status, `None` when the id is unknown, and whether this call killed it. A child whose exit
            had begun before counts as ended by itself, though the kernel closes its sockets a little before it can be
            waited for.
        """
        pid = self.pids.pop(request_id, None)
        if pid is None:
            return self.statuses.pop(request_id, None), False
        done, status = os.waitpid(pid, os.WNOHANG)
        lived = not done and not _is_exiting(pid)
        if not done:
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
        _kill_group(pid)
        self.kill_strays()
        return status, lived

    def collect(self) -> None:
        """Reap the children that ended by themselves."""
        for request_id, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.pids[request_id]
                self.statuses[request_id] = status
                _kill_group(pid)

    def kill_strays(self) -> None:
        """End the orphans that this server adopted: processes that agent code started in sessions of their own."""
        known = set(self.pids.values())
        for pid in _children(os.getpid()):
            if pid not in known:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _is_exiting(pid: int) -> bool:
    """Whether the kernel has begun to end the process. It sets this flag before it closes the process's files."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return bool(int(file.read().rpartition(b")")[2].split()[6]) & PF_EXITING)


def _children(parent: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{parent}/children") as file:
        return [int(pid) for pid in file.read().split()]
    # Not every kernel is built with that file.
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
