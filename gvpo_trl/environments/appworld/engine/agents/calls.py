"""The interpreter's end of the socket to its world (`world.py`): API calls that a step's time-out may break off."""

import contextlib
import itertools
import json
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from gvpo_trl.environments.appworld.wire import values

_LENGTH = struct.Struct(">I")
_dumps, _loads, _sigmask = json.dumps, json.loads, signal.pthread_sigmask


class Calls:
    """Makes one call at a time.

    The step's time-out is an exception that comes between any two instructions. It is let in only while nothing is
    half done, so that the next call never waits for an answer that was read already, or to a call that was never sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._numbers = itertools.count(1)
        self._awaited: int | None = None
        self._dice = values.Dice()

    def __call__(self, app: str, api: str, arguments: dict) -> dict:
        """The world's answer: a response's `status` and `text` and the requests that were `tracked`, or an `error`."""
        try:
            arguments = values.encode(arguments)
        except RecursionError:
            raise ValueError("Circular reference detected") from None
        self._finish()  # with a call that a time-out broke off; the world takes one at a time
        self._undisturbed(self._ask, app, api, arguments)
        return self._finish()

    def _ask(self, app: str, api: str, arguments) -> None:
        number = next(self._numbers)
        message = {"id": number, "app": app, "api": api, "arguments": arguments, "random": self._dice.news()}
        try:
            payload = _dumps(message).encode()
        except RecursionError:
            raise ValueError("Circular reference detected") from None
        if len(payload) > values.MAX_CALL_BYTES:
            raise Exception(f"A call of {len(payload)} bytes is over the limit of {values.MAX_CALL_BYTES}.")
        self._outgoing += _LENGTH.pack(len(payload)) + payload
        self._awaited = number

    def _finish(self) -> dict | None:
        """Send what is left to send, and wait for the answer that is awaited, if one is."""
        reply = None
        while self._awaited is not None:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT if self._outgoing else select.POLLIN)
            poll.poll()
            reply = self._undisturbed(self._write if self._outgoing else self._read)
        return reply

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._outgoing[: self._sock.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]

    def _read(self) -> dict | None:
        """Read a piece; the answer, once it is whole."""
        try:
            chunk = self._sock.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not chunk:
            raise ConnectionError("the world is gone")
        self._incoming += chunk
        if len(self._incoming) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        reply = _loads(bytes(self._incoming[_LENGTH.size : end]))
        del self._incoming[:end]
        if reply["id"] != self._awaited:
            return None
        self._awaited = None
        if reply.get("random"):
            self._dice.take(reply["random"])
        return reply

    @staticmethod
    def _undisturbed(action: Callable[..., Any], *arguments):
        """Have a time-out wait until the action is done, or come before it."""
        try:
            _sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # inside: a signal that came just before is raised here
            return action(*arguments)
        finally:
            _sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
