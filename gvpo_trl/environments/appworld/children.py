"""The trainer's side of a process that a host has forked: a world, an interpreter or an evaluator."""

import select
import socket
import time

from gvpo_trl.environments.appworld.hosts import HostKeeper, HostProcess
from gvpo_trl.environments.appworld.wire import frames
from gvpo_trl.faults import EnvironmentFault, EpisodeFault


class Child:
    """One forked process and the socket to it.

    Args:
        keeper: keeps the host that forks the process.
        request: the kind of process to fork, and its arguments.
        peer: a socket to another child, which this one takes over.

    Raises:
        HostFault, EnvironmentsExhausted: the host is gone and does not come up again.
        EpisodeFault: the host cannot fork.
    """

    def __init__(self, keeper: HostKeeper, request: dict, peer: socket.socket | None = None) -> None:
        self.keeper = keeper
        self.host: HostProcess = keeper.get()
        self.alive = True
        """Whether this side has not ended the process yet."""
        self.status: int | None = None
        """The wait status of the ended process, as far as its host knows it."""
        self.killed = False
        """Whether the process was alive until this side ended it."""
        self.has_waited = False
        """Whether the process has done its work before and then waited for more."""
        try:
            self.number, self.pid, self.sock = self.host.spawn(request, peer)
        except EnvironmentFault as error:
            self._report(error)
            raise

    def call(
        self,
        message: dict | None,
        timeout_s: float,
        limit: int = frames.MAX_FRAME_BYTES,
        watched: "Child | None" = None,
    ) -> dict:
        """Send a message, if any, and wait for the answer.

        Args:
            message: what to send.
            timeout_s: deadline of the answer.
            limit: longest answer, in bytes.
            watched: a process that this one needs for its answer and that only speaks when asked. Data from it before
                the answer means that it has ended. Give it where this process runs agent code: a fault that such a
                process reports is not believed.

        Raises:
            ChannelError: no answer came. The process has been ended, and `status` says how if its host still knows.
            EnvironmentFault: the host is gone, or the process says that our machinery failed.
        """
        try:
            if message is not None:
                self.sock.settimeout(timeout_s)
                frames.send(self.sock, message)
            deadline = time.monotonic() + timeout_s
            if watched is not None:
                watched.check_alive_until_readable(self.sock, timeout_s)
            reply = frames.receive(self.sock, max(0.0, deadline - time.monotonic()), limit)
        except frames.ChannelError:
            self.end()
            raise
        except BaseException:
            self.end(quiet=True)
            raise
        if "fault" in reply and watched is None:
            self.end()
            raise EpisodeFault(str(reply["fault"]))
        return reply

    def check_alive_until_readable(self, sock: socket.socket, timeout_s: float) -> None:
        """Wait until another socket has data, at most `timeout_s`, and check that this process lives until then.

        Raises:
            EnvironmentFault: this process ended first.
        """
        readable = _wait_readable([sock, self.sock], timeout_s)
        if self.sock in readable and sock not in readable:
            self.end()
            raise EpisodeFault(f"a process of ours ended while another one worked for it (wait status {self.status})")

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for an answer or for the process's end; `False` when neither comes within `timeout_s`."""
        return bool(_wait_readable([self.sock], timeout_s))

    def send(self, message: dict, timeout_s: float) -> None:
        """Send a message that has no answer; raises as `call` does."""
        try:
            self.sock.settimeout(timeout_s)
            frames.send(self.sock, message)
        except frames.ChannelError:
            self.end()
            raise

    def end(self, quiet: bool = False) -> None:
        """Kill the process and what it started; idempotent.

        Args:
            quiet: don't raise when the host is gone.
        """
        if not self.alive:
            return
        self.alive = False
        self.sock.close()
        try:
            self.status, self.killed = self.host.reap(self.number)
        except EnvironmentFault as error:
            self._report(error)
            if not quiet:
                raise

    def _report(self, error: EnvironmentFault) -> None:
        if self.host.dead:
            self.keeper.report_death(self.host, error)


def _wait_readable(socks: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Wait at most `timeout_s` until a socket has data or is closed, and return the sockets that are ready."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
    return [sock for sock in socks if sock.fileno() in ready]
