"""The interpreter's end of the socket to its world: API calls that a step's time-out may interrupt."""

import contextlib
import itertools
import json
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from gvpo_trl.environments.appworld.wire import frames, values

# Agent code may replace these in their modules.
_dumps, _loads, _sigmask = json.dumps, json.loads, signal.pthread_sigmask


class Calls:
    """Makes one call at a time.

    The step's time-out is an exception that can be raised between any two instructions. Its signal is blocked wherever
    the state would be half changed, so that the next call never waits for an answer that was read already, or for the
    answer to a call that was never sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming, self._outgoing = frames.FrameBuffer(), bytearray()
        self._numbers = itertools.count(1)
        self._awaited: int | None = None
        self._random = values.SharedRandom()

    def __call__(self, app: str, api: str, arguments: dict) -> dict:
        """Return the world's answer: `status`, `text` and the `tracked` requests of a response, or an `error`."""
        try:
            arguments = values.encode(arguments)
        except RecursionError:
            raise ValueError("Circular reference detected") from None
        self._finish()  # ends an interrupted call, because the world takes one call at a time
        self._uninterrupted(self._queue, app, api, arguments)
        return self._finish()

    def _queue(self, app: str, api: str, arguments) -> None:
        number = next(self._numbers)
        message = {
            "id": number,
            "app": app,
            "api": api,
            "arguments": arguments,
            "random": self._random.changed_state(),
        }
        try:
            payload = _dumps(message).encode()
        except RecursionError:
            raise ValueError("Circular reference detected") from None
        if len(payload) > values.MAX_CALL_BYTES:
            raise Exception(f"A call of {len(payload)} bytes is over the limit of {values.MAX_CALL_BYTES}.")
        try:
            frames.check_nodes(payload)
        except frames.TooManyNodes as error:
            raise Exception(f"A call is {error}.") from None
        self._outgoing += frames.pack_frame(payload)
        self._awaited = number

    def _finish(self) -> dict | None:
        """Send what is left to send, then wait for the answer if a call awaits one."""
        reply = None
        while self._awaited is not None:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT if self._outgoing else select.POLLIN)
            poll.poll()
            reply = self._uninterrupted(self._write if self._outgoing else self._read)
        return reply

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._outgoing[: self._sock.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]

    def _read(self) -> dict | None:
        """Read a piece of the answer, and return the answer once it is complete."""
        try:
            chunk = self._sock.recv(frames.PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not chunk:
            raise ConnectionError("the world is gone")
        payload = self._incoming.feed(chunk)
        if payload is None:
            return None
        reply = _loads(payload)
        if reply["id"] != self._awaited:
            return None
        self._awaited = None
        if reply.get("random"):
            self._random.take(reply["random"])
        return reply

    @staticmethod
    def _uninterrupted(action: Callable[..., Any], *arguments):
        """Run the action so that a time-out is raised before or after it, never inside it."""
        try:
            _sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # a signal that arrived just before is raised here
            return action(*arguments)
        finally:
            _sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
