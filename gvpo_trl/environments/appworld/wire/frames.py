"""Messages between the trainer, the hosts and their children, for every side of their sockets.

There are two kinds of sockets. The *control* socket between the trainer and a host keeps message boundaries
(SOCK_SEQPACKET) and carries file descriptors. The *stream* socket of one episode or evaluation carries frames: four
bytes of length, then JSON. Pickle is never used: agent code may have written the message, so it must be mere data.
"""

import json
import os
import re
import socket
import struct
import time

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
MAX_NODES = 100_000
"""Values and keys that a message may hold. A small message can hold many, and each takes some 60 bytes of memory."""
PIECE_BYTES = 1 << 20
"""Bytes that one system call reads at most."""
_LENGTH = struct.Struct(">I")
_STRING = re.compile(rb'"[^"]*"')


class ChannelError(Exception):
    """A message could not be sent or received."""


class ChannelClosed(ChannelError):
    """The other side is gone, before a message or in the middle of one."""


class ChannelTimeout(ChannelError):
    """No whole message arrived before the deadline."""


class ChannelGarbage(ChannelError):
    """The received message is too long, or no JSON object."""


class FrameTooLong(ChannelGarbage):
    """A frame announces more bytes than the limit.

    Args:
        announced: bytes of the frame's payload.
        limit: the most bytes that are accepted.
    """

    def __init__(self, announced: int, limit: int) -> None:
        super().__init__(f"a frame announces {announced} bytes, the limit is {limit}")
        self.announced = announced


class TooManyNodes(ChannelGarbage):
    """A message holds more values and keys than the limit."""


def check_nodes(payload: bytes, limit: int = MAX_NODES) -> None:
    """Check, before a message is parsed, that it does not hold more values and keys than `limit`.

    The check takes time that is linear in the length of the message, whatever the message holds.

    Raises:
        TooManyNodes: the message may hold more.
    """
    if _count(payload) < limit:
        return
    # Once escaped quotes are removed, everything between two quotes is a string.
    payload = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    if payload.count(b'"') > 2 * limit or _count(_STRING.sub(b"", payload)) >= limit:
        raise TooManyNodes(f"a message of more than {limit} values")


def _count(payload: bytes) -> int:
    """Return the number of signs in JSON that precede a value or a key."""
    return sum(payload.count(sign) for sign in (b",", b"[", b"{", b":"))


def pack_frame(payload: bytes) -> bytes:
    """Return the bytes of one frame."""
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Collects the bytes of frames as they arrive; `len` of it is the number of bytes that it holds.

    Args:
        limit: the most bytes that a frame's payload may have.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def missing(self) -> int:
        """Bytes that the current frame still lacks; while its length is incomplete, bytes that the length lacks."""
        return max(0, self._end() - len(self._bytes))

    def feed(self, chunk: bytes) -> bytes | None:
        """Add received bytes; return the payload of the current frame once it is complete, else `None`.

        Bytes after that frame stay for the next one.

        Raises:
            FrameTooLong: the frame announces more bytes than the limit.
        """
        self._bytes += chunk
        end = self._end()
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return payload

    def _end(self) -> int:
        """Return where the current frame ends, or where its length ends while the length is incomplete."""
        if len(self._bytes) < _LENGTH.size:
            return _LENGTH.size
        (announced,) = _LENGTH.unpack_from(self._bytes)
        if announced > self._limit:
            raise FrameTooLong(announced, self._limit)
        return _LENGTH.size + announced


def send(sock: socket.socket, message: dict, limit: int = MAX_FRAME_BYTES) -> None:
    """Send one frame.

    Raises:
        ChannelClosed: the other side is gone.
        ChannelTimeout: the socket has a time-out and the other side does not read.
        ChannelGarbage: the message is longer than `limit` bytes.
    """
    payload = json.dumps(message).encode()
    if len(payload) > limit:
        raise ChannelGarbage(f"a message of {len(payload)} bytes is over the limit of {limit}")
    try:
        sock.sendall(pack_frame(payload))
    except TimeoutError as error:
        raise ChannelTimeout("the other side does not read") from error
    except OSError as error:
        raise ChannelClosed(f"cannot send: {error}") from error


def receive(sock: socket.socket, timeout_s: float | None = None, limit: int = MAX_FRAME_BYTES) -> dict:
    """Receive one frame within `timeout_s` in all; `None` waits for ever.

    Raises:
        ChannelClosed: the other side is gone.
        ChannelTimeout: the time is up.
        ChannelGarbage: the frame is longer than `limit` bytes, holds too many values, or is no JSON object.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    buffer, payload = FrameBuffer(limit), None
    while payload is None:
        chunk = _receive_piece(sock, min(buffer.missing, PIECE_BYTES), deadline)
        if not chunk:
            raise ChannelClosed("closed in the middle of a message" if len(buffer) else "closed")
        payload = buffer.feed(chunk)
    return _decode(payload)


def _receive_piece(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise ChannelTimeout("no answer in time")
    try:
        sock.settimeout(remaining)
        return sock.recv(size)
    except TimeoutError as error:
        raise ChannelTimeout("no answer in time") from error
    except OSError as error:
        raise ChannelClosed(f"cannot receive: {error}") from error


def send_control(sock: socket.socket, message: dict, fds: tuple[int, ...] = ()) -> None:
    """Send one control message, with file descriptors for the other side.

    Raises:
        ChannelClosed: the other side is gone.
        ChannelTimeout: the other side does not read.
    """
    payload = json.dumps(message).encode()
    assert len(payload) <= MAX_CONTROL_BYTES, "control messages are short"
    try:
        socket.send_fds(sock, [payload], list(fds))
    except TimeoutError as error:
        raise ChannelTimeout("the other side does not read") from error
    except OSError as error:
        raise ChannelClosed(f"cannot send: {error}") from error


def receive_control(sock: socket.socket, timeout_s: float | None = None) -> tuple[dict, list[int]]:
    """Receive one control message and the file descriptors that came with it.

    Raises:
        ChannelClosed: the other side is gone.
        ChannelTimeout: the time is up.
        ChannelGarbage: the message is no JSON object.
    """
    try:
        sock.settimeout(timeout_s)
        payload, fds, _, _ = socket.recv_fds(sock, MAX_CONTROL_BYTES, 4)
    except TimeoutError as error:
        raise ChannelTimeout("no answer in time") from error
    except OSError as error:
        raise ChannelClosed(f"cannot receive: {error}") from error
    if not payload:
        raise ChannelClosed("closed")
    try:
        return _decode(payload), fds
    except ChannelGarbage:
        for fd in fds:
            os.close(fd)
        raise


def _decode(payload: bytes) -> dict:
    check_nodes(payload)
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ChannelGarbage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ChannelGarbage("not a JSON object")
    return message
