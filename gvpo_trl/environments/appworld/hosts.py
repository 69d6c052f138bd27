"""The trainer's side of a fork server: start it, ask it for children, notice its death, start it again."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.environments.appworld.wire import frames
from gvpo_trl.environments.appworld.workspace import Workspace
from gvpo_trl.faults import EnvironmentFault, EnvironmentsExhausted, EpisodeFault

CONTROL_TIMEOUT_S = 30.0
_BARE = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|COOKIE", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start one kind of host."""

    name: str
    """For messages and the log: `host` or `evaluator`."""
    python: Path
    """The interpreter of AppWorld's own virtual environment."""
    module: str
    """What runs in the host: the full name of a module of `engine`."""
    root: Path
    """AppWorld's data root."""
    workspace: Workspace
    config: dict = field(default_factory=dict)
    """Handed to the script as JSON."""
    ready_timeout_s: float = 300.0
    fault: type[EnvironmentFault]
    """What its death is called."""
    bare: bool = False
    """Whether its children run agent code alone: then it sees next to none of our variables."""

    def command(self, *arguments: str) -> list[str]:
        """What starts the host."""
        return boot.command(self.python, self.module, *arguments)

    def environment(self) -> dict[str, str]:
        """The variables that a host sees: no credential, no home folder of ours."""
        scratch = self.workspace.scratch
        kept = {
            name: value
            for name, value in os.environ.items()
            if not _SECRET.search(name) and not name.startswith(("PYTHON", "APPWORLD", "GVPO"))
        }
        if self.bare:
            kept = {name: value for name, value in kept.items() if name in _BARE}
        return kept | {
            "APPWORLD_ROOT": str(scratch / "home" if self.bare else self.root),
            "APPWORLD_CACHE": str(scratch / "cache"),
            "HOME": str(scratch / "home"),
            "IPYTHONDIR": str(scratch / "ipython"),
            "TMPDIR": str(scratch / "tmp"),
            "SQLITE_TMPDIR": str(scratch / "tmp"),
            "GVPO_HOST": json.dumps({"outputs": str(self.workspace.outputs), "scratch": str(scratch)} | self.config),
        }


class HostProcess:
    """One running fork server. Thread-safe; every failure to talk to it is `launch.fault`."""

    def __init__(self, launch: Launch, generation: int) -> None:
        self.launch = launch
        self.dead = False
        self._lock = threading.Lock()
        self._sequence = 0
        self._ready: dict | None = None
        self.log_path = launch.workspace.path / f"{launch.name}-{generation}.log"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.process = self._start(theirs)
        except OSError as error:  # no process, no descriptor, no room on the disk
            self._control.close()
            raise launch.fault(f"the {launch.name} cannot be started: {error}") from error

    def _start(self, theirs: socket.socket) -> subprocess.Popen:
        launch = self.launch
        with theirs, open(self.log_path, "w") as log:
            return subprocess.Popen(
                launch.command(str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is ours to act on
            )

    def wait_ready(self) -> dict:
        """Wait for the end of the warm-up; what the host says of itself."""
        with self._lock:
            if self._ready is None:
                try:
                    message, _ = frames.receive_control(self._control, self.launch.ready_timeout_s)
                except frames.ChannelTimeout as error:
                    raise self._lost(f"was not ready after {self.launch.ready_timeout_s:g} s") from error
                except frames.ChannelError as error:
                    raise self._lost("died while it warmed up") from error
                if not message["ready"]:
                    raise self._lost(f"could not warm up: {message['error'].strip()}")
                self._ready = message
            return self._ready

    def spawn(self, request: dict, peer: socket.socket | None = None) -> tuple[int, socket.socket]:
        """Fork a child for the request, with a socket to another child; its id and the socket to talk to it."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                sockets = [theirs] if peer is None else [theirs, peer]
                reply, sequence = self._ask({"op": "spawn", **request}, tuple(sock.fileno() for sock in sockets))
            if not reply["ok"]:
                raise EpisodeFault(f"the {self.launch.name} {reply['error']}")
        except BaseException:
            ours.close()
            raise
        return sequence, ours

    def reap(self, child: int) -> tuple[int | None, bool]:
        """End a child and what it started.

        Its wait status, `None` when there is no such child any more; and whether it lived until then.
        """
        reply, _ = self._ask({"op": "reap", "child": child})
        return reply["status"], reply["killed"]

    def _ask(self, message: dict, fds: tuple[int, ...] = ()) -> tuple[dict, int]:
        with self._lock:
            if self.dead:
                raise self.launch.fault(f"the {self.launch.name} is gone")
            self._sequence += 1
            sequence = self._sequence
            try:
                self._control.settimeout(CONTROL_TIMEOUT_S)
                frames.send_control(self._control, message | {"id": sequence}, fds)
                while True:
                    reply, _ = frames.receive_control(self._control, CONTROL_TIMEOUT_S)
                    # An answer to a question whose asker was interrupted is passed over.
                    if reply["id"] == sequence:
                        return reply, sequence
            except frames.ChannelError as error:
                raise self._lost(f"cannot be reached ({error})") from error

    def _lost(self, what: str) -> EnvironmentFault:
        self.dead = True
        self.kill()
        return self.launch.fault(f"the {self.launch.name} {what}, {self._ending()}{self.tail()}")

    def _ending(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}"

    def tail(self, characters: int = 1500) -> str:
        """The end of what the host wrote to its log, on lines of its own; empty when it wrote nothing."""
        try:
            text = self.log_path.read_text(errors="replace").strip()
        except OSError:
            return ""
        return f"; its last words:\n{text[-characters:]}" if text else ""

    def kill(self) -> None:
        """End the host at once; the kernel ends its children."""
        self._control.close()
        self.process.kill()
        self.process.wait()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the host end itself and its children; idempotent."""
        self.dead = True
        self._control.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


class HostKeeper:
    """Keeps one host running: starts it when first needed and again after a death, until it dies too often."""

    def __init__(self, launch: Launch, max_restarts: int) -> None:
        self.launch = launch
        self.max_restarts = max_restarts
        self._lock = threading.Lock()
        self._host: HostProcess | None = None
        self._generation = 0
        self._deaths = 0
        self._closed = False
        self._last_cause = ""

    def get(self) -> HostProcess:
        """A host that is ready.

        Raises:
            EnvironmentFault: of the launch's kind, when the host does not come up.
            EnvironmentsExhausted: when it died more than `max_restarts` times since the last success.
        """
        with self._lock:
            self._start()
            host = self._host
        try:
            host.wait_ready()
        except EnvironmentFault as error:
            self.report_death(host, error)
            raise
        return host

    def _start(self) -> None:
        if self._closed:
            raise self.launch.fault("the environment is closed")
        if self._host is not None and self._host.dead:
            self._host = None
        if self._host is None:
            if self._deaths > self.max_restarts:
                raise EnvironmentsExhausted(
                    f"the {self.launch.name} died {self._deaths} times in a row; last cause: {self._last_cause}"
                )
            self._generation += 1
            time.sleep(min(2.0, 0.1 * self._deaths**2))
            try:
                self._host = HostProcess(self.launch, self._generation)
            except EnvironmentFault as error:
                self._deaths += 1
                self._last_cause = str(error)
                raise

    def begin(self) -> None:
        """Start the host if there is none, and don't wait until it is ready; raises as `get` does."""
        with self._lock:
            self._start()

    def report_death(self, host: HostProcess, cause: EnvironmentFault) -> None:
        """Count a host's death once, however many episodes notice it."""
        with self._lock:
            if self._host is host:
                self._host = None
                self._deaths += 1
                self._last_cause = str(cause)

    def report_success(self) -> None:
        """An episode or an evaluation went through: earlier deaths don't count any more."""
        self._deaths = 0

    def close(self) -> None:
        """End the host; idempotent."""
        with self._lock:
            self._closed = True
            host, self._host = self._host, None
        if host is not None:
            host.close()


class Child:
    """One forked process and the socket to it, with the deaths of either told apart.

    Args:
        keeper: keeps the host that forks it.
        request: what kind of process, and what for.
        peer: a socket to another child, for this one to take along.
    """

    def __init__(self, keeper: HostKeeper, request: dict, peer: socket.socket | None = None) -> None:
        self.keeper = keeper
        self.host: HostProcess = keeper.get()
        self.alive = True
        self.status: int | None = None
        self.killed = False
        """Whether it lived until it was ended from here."""
        self.kept = False
        """Whether it has done its work before and waited for more."""
        try:
            self.id, self.sock = self.host.spawn(request, peer)
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
        """Send a message, if any, and wait for an answer of at most `limit` bytes.

        `watched` is a process that says nothing unasked: a sound from it before the answer is its end. A child that is
        watched over in this way runs agent code, and what it says of a fault of ours is not believed.

        Raises:
            ChannelError: no answer; the child has been ended and `status` says how, if the host still knows.
            EnvironmentFault: the host is gone, or the child says that our machinery failed.
        """
        try:
            if message is not None:
                self.sock.settimeout(timeout_s)
                frames.send(self.sock, message)
            deadline = time.monotonic() + timeout_s
            if watched is not None:
                watched.check_silent_until(self.sock, timeout_s)
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

    def check_silent_until(self, sock: socket.socket, timeout_s: float) -> None:
        """Wait until there is something to read on `sock`, or for `timeout_s`.

        Raises:
            EnvironmentFault: this process ended meanwhile.
        """
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self.sock, select.POLLIN)
        heard = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        if self.sock.fileno() in heard and sock.fileno() not in heard:
            self.end()
            raise EpisodeFault(f"a process of ours ended while another one worked for it (wait status {self.status})")

    def speaks_within(self, timeout_s: float) -> bool:
        """Whether there is something to read within that time: an answer, or the process's end."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def send(self, message: dict, timeout_s: float) -> None:
        """Send a message that has no answer; raises as `call` does."""
        try:
            self.sock.settimeout(timeout_s)
            frames.send(self.sock, message)
        except frames.ChannelError:
            self.end()
            raise

    def end(self, quiet: bool = False) -> None:
        """Kill the process and what it started; idempotent."""
        if not self.alive:
            return
        self.alive = False
        self.sock.close()
        try:
            self.status, self.killed = self.host.reap(self.id)
        except EnvironmentFault as error:
            self._report(error)
            if not quiet:
                raise

    def _report(self, error: EnvironmentFault) -> None:
        if self.host.dead:
            self.keeper.report_death(self.host, error)
