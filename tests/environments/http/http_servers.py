"""Starts AppWorld's own environment servers on loopback, for tests and for benchmarks/episodes.py."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from gvpo_trl.environments.appworld.setup import appworld_python

SCRIPT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[2]):
    sys.exit("the parent is gone")
import uvicorn
from appworld.serve.environment import app
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
READY_TIMEOUT_S = 60.0


class HttpServers:
    """Running servers, as a context manager. Their worlds save in a folder that is deleted at the end.

    Args:
        root: AppWorld's data root; only its `data/` is used.
        count: how many servers.
        venv: AppWorld's virtual environment, the default one by default.
    """

    def __init__(self, root: Path, count: int, venv: Path | None = None) -> None:
        self._python = appworld_python(venv)
        self._folder = Path(tempfile.mkdtemp(prefix="appworld-http-"))
        (self._folder / "data").symlink_to(Path(root).resolve() / "data")
        self._ports = free_ports(count)
        self.processes: list[subprocess.Popen] = []
        try:
            self.processes = [self._start(port) for port in self._ports]
            for number in range(count):
                self.wait_ready(number)
        except BaseException:
            self.close()
            raise

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def outputs(self) -> Path:
        """Where worlds save their state."""
        return self._folder / "experiments" / "outputs"

    def _start(self, port: int) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "APPWORLD"))}
        own = {"APPWORLD_ROOT": str(self._folder), "APPWORLD_CACHE": str(self._folder / "cache")}
        with open(self._folder / f"{port}.log", "a") as log:
            return subprocess.Popen(
                [str(self._python), "-I", "-c", SCRIPT, str(port), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=kept | own | {"HOME": str(self._folder), "IPYTHONDIR": str(self._folder / "ipython")},
                cwd=self._folder,
                start_new_session=True,
            )

    def wait_ready(self, number: int) -> None:
        """Wait until a server answers."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.processes[number].poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self._ports[number], timeout=5)
                with contextlib.closing(connection):
                    connection.request("GET", "/")
                    if connection.getresponse().status == 200:
                        return
            time.sleep(0.1)
        log = (self._folder / f"{self._ports[number]}.log").read_text()
        raise RuntimeError(f"{self.urls[number]} was not ready after {READY_TIMEOUT_S:g} s: {log[-1500:]}")

    def kill(self, number: int) -> None:
        """Kill a server; after a SIGTERM it would first finish the code that it runs."""
        self.processes[number].kill()
        self.processes[number].wait()

    def restart(self, number: int, wait: bool = True) -> None:
        """Start a server again at the same address."""
        self.kill(number)
        self.processes[number] = self._start(self._ports[number])
        if wait:
            self.wait_ready(number)

    def close(self) -> None:
        """Kill all servers and delete what they saved."""
        for number in range(len(self.processes)):
            self.kill(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "HttpServers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
