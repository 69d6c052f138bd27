"""Bounds on what a server can make this process do: on the time and the bytes of an exchange, and on test results."""

import http.client
import io
import socket
import time
from typing import Any

MAX_TESTS = 10_000
"""The most unit tests that a task can have; AppWorld's tasks have fewer than a hundred."""
PIECE_BYTES = 65536


class TooManyBytes(http.client.HTTPException):
    """The server sent more than was allowed."""


class BoundedSocket:
    """A connected socket, as `http.client` uses it, with one deadline and one allowance of bytes for all it does.

    A time-out of the socket itself would begin anew with each piece that arrives, so a server could send a header byte
    by byte for ever; and `http.client` skips any number of interim responses.

    Args:
        sock: the connected socket, which the caller closes.
        deadline: time of the monotonic clock after which every operation raises a `TimeoutError`.
        max_bytes: how many bytes may be received; `allow` raises this number.
    """

    def __init__(self, sock: socket.socket, deadline: float, max_bytes: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self._allowed = max_bytes

    def allow(self, more_bytes: int) -> None:
        """Let the server send `more_bytes` more bytes."""
        self._allowed += more_bytes

    def sendall(self, data: bytes) -> None:
        """Send all of the data."""
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(time_left(self._deadline))
            rest = rest[self._sock.send(rest) :]

    def receive_into(self, buffer: memoryview) -> int:
        """Receive a piece and return its length, which is 0 at the end.

        Raises:
            TimeoutError: the deadline is over.
            TooManyBytes: the server has sent all that it may send.
        """
        if self._allowed <= 0:
            raise TooManyBytes("the answer is too long")
        self._sock.settimeout(time_left(self._deadline))
        received = self._sock.recv_into(buffer, min(len(buffer), self._allowed))
        self._allowed -= received
        return received

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the file from which `http.client` reads the response."""
        assert mode == "rb"
        return io.BufferedReader(_Stream(self), PIECE_BYTES)

    def close(self) -> None:
        """Do nothing: `http.client` closes its socket while the response is still being read."""


class _Stream(io.RawIOBase):
    def __init__(self, sock: BoundedSocket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.receive_into(memoryview(buffer))


def time_left(deadline: float) -> float:
    """Return the seconds until a time of the monotonic clock; raise a `TimeoutError` when it is over."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def read_report(report: Any) -> tuple[list[str], list[str]]:
    """Return the requirements of the tests that passed and of those that did not, from the answer of `/evaluate`.

    AppWorld counts a test that did not run as not passed.

    Raises:
        ValueError: the report is not of AppWorld's form.
    """
    if not isinstance(report, dict):
        raise ValueError("the report is no object")
    passed, failed = (_requirements(report, name) for name in ("passes", "failures"))
    number = report.get("num_tests")
    if type(number) is not int or not 0 <= number <= MAX_TESTS:
        raise ValueError(f"num_tests={str(number)[:50]} is no number of tests from 0 to {MAX_TESTS}")
    missing = number - len(passed) - len(failed)
    if missing < 0:
        raise ValueError(f"num_tests={number}, but there are results of {len(passed) + len(failed)} tests")
    return passed, failed + ["a test that did not run"] * missing


def _requirements(report: dict, name: str) -> list[str]:
    entries = report.get(name)
    if not isinstance(entries, list) or len(entries) > MAX_TESTS:
        raise ValueError(f"{name} is no list of at most {MAX_TESTS} tests")
    texts = [entry.get("requirement") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} holds something that is no test with a requirement")
    return texts
