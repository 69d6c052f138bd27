"""The trainer's side of a host: it starts the host, notices its death and starts it again."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.environments.appworld.wire import frames
from gvpo_trl.environments.appworld.workspace import Workspace
from gvpo_trl.faults import EnvironmentFault, EnvironmentsExhausted, EpisodeFault, HostFault

CONTROL_TIMEOUT_S = 30.0
"""Deadline of a host's answer on its control socket."""
_BARE = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|COOKIE", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start one kind of host."""

    name: str
    """For messages and the log: `host` forks worlds and evaluators, `agent-host` forks interpreters."""
    python: Path
    """The interpreter of AppWorld's own virtual environment."""
    module: str
    """Full name of the module of `engine` that runs in the host."""
    workspace: Workspace
    """Where the host and its children write."""
    config: dict
    """The module's configuration, which it gets as JSON."""
    root: Path | None = None
    """AppWorld's data root. `None` for a host whose children run agent code: the host does not know where the data
    lies, and it gets next to none of the trainer's environment variables."""
    ready_timeout_s: float = 300.0
    """Deadline of the warm-up."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that starts the host."""
        return boot.command(self.python, self.module, *arguments)

    def environment(self) -> dict[str, str]:
        """Return the host's environment variables, without the trainer's credentials and home folder."""
        scratch = self.workspace.scratch
        kept = {
            name: value
            for name, value in os.environ.items()
            if not _SECRET.search(name) and not name.startswith(("PYTHON", "APPWORLD", "GVPO"))
        }
        if self.root is None:
            kept = {name: value for name, value in kept.items() if name in _BARE}
        return kept | {
            "APPWORLD_ROOT": str(scratch / "home" if self.root is None else self.root),
            "APPWORLD_CACHE": str(scratch / "cache"),
            "HOME": str(scratch / "home"),
            "IPYTHONDIR": str(scratch / "ipython"),
            "TMPDIR": str(scratch / "tmp"),
            "SQLITE_TMPDIR": str(scratch / "tmp"),
            "GVPO_HOST": json.dumps(self.config),
        }


class HostProcess:
    """One running host. Thread-safe; every failure to talk to it is a `HostFault`.

    Args:
        launch: how to start it.
        generation: its number among the hosts of its kind, which counts from 1.
    """

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
        except OSError as error:  # no more processes or descriptors are allowed, or the disk is full
            self._control.close()
            raise HostFault(f"the {launch.name} cannot be started: {error}") from error

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
                start_new_session=True,  # a Ctrl-C at the terminal is for this process alone
            )

    def wait_ready(self) -> dict:
        """Wait for the end of the warm-up, and return the facts that the host reports about itself."""
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

    def spawn(self, request: dict, peer: socket.socket | None = None) -> tuple[int, int, socket.socket]:
        """Have a child forked.

        Args:
            request: the kind of child to fork, and its arguments.
            peer: a socket to another child, which this one takes over.

        Returns:
            The child's number for `reap`, its process id, and the socket on which to talk to it.
        """
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
        return sequence, reply["pid"], ours

    def reap(self, number: int) -> tuple[int | None, bool]:
        """End a child and the processes that it started.

        Returns:
            The child's wait status, `None` when the host knows no such child, and whether it was alive until now.
        """
        reply, _ = self._ask({"op": "reap", "child": number})
        return reply["status"], reply["killed"]

    def _ask(self, message: dict, fds: tuple[int, ...] = ()) -> tuple[dict, int]:
        with self._lock:
            if self.dead:
                raise HostFault(f"the {self.launch.name} is gone")
            self._sequence += 1
            sequence = self._sequence
            try:
                self._control.settimeout(CONTROL_TIMEOUT_S)
                frames.send_control(self._control, message | {"id": sequence}, fds)
                while True:
                    reply, _ = frames.receive_control(self._control, CONTROL_TIMEOUT_S)
                    # This may be the answer to an earlier question, whose asker was interrupted.
                    if reply["id"] == sequence:
                        return reply, sequence
            except frames.ChannelError as error:
                raise self._lost(f"cannot be reached ({error})") from error

    def _lost(self, what: str) -> HostFault:
        self.dead = True
        self.kill()
        return HostFault(f"the {self.launch.name} {what}, {self._ending()}{self.tail()}")

    def _ending(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}"

    def tail(self, characters: int = 1500) -> str:
        """Return the end of the host's log on lines of its own, or an empty text if the host has written nothing."""
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
        """Have the host end itself and its children; idempotent."""
        self.dead = True
        self._control.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


class HostKeeper:
    """Keeps one host running: starts it when it is first needed and again after each death, up to a limit.

    Args:
        launch: how to start the host.
        max_restarts: how often in a row the host may die.
    """

    def __init__(self, launch: Launch, max_restarts: int) -> None:
        self.launch = launch
        self.max_restarts = max_restarts
        self._lock = threading.Lock()
        self._host: HostProcess | None = None
        self._generation = 0
        self._deaths = 0
        self._closed = False
        self._last_cause = ""

    @property
    def host(self) -> HostProcess | None:
        """The host that runs now, or ran last; `None` before the first one and after one that was found dead."""
        return self._host

    @property
    def deaths(self) -> int:
        """How often the host has died since the last success."""
        return self._deaths

    def get(self) -> HostProcess:
        """Return a host that is ready.

        Raises:
            HostFault: the host does not come up.
            EnvironmentsExhausted: it has died more than `max_restarts` times since the last success.
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
            raise HostFault("the environment is closed")
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
        """Start the host if there is none, without waiting until it is ready; raises as `get` does."""
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
        """Forget earlier deaths, because an episode was scored."""
        self._deaths = 0

    def close(self) -> None:
        """End the host; idempotent."""
        with self._lock:
            self._closed = True
            host, self._host = self._host, None
        if host is not None:
            host.close()
