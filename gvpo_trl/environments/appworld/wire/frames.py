"""Messages between the trainer, the hosts and their children: standard library only, used on both sides.

Two kinds of sockets. The *control* socket between the trainer and a host keeps message boundaries (SOCK_SEQPACKET) and
carries file descriptors. The *stream* socket of one episode or evaluation carries frames: four bytes of length, then
JSON. Never pickle: an episode's process runs agent code, so nothing it sends may be more than data.
"""

import json
import os
import socket
import struct
import time

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")


class ChannelError(Exception):
    """A message could not be sent or received."""


class ChannelClosed(ChannelError):
    """The other side is gone, before a message or in the middle of one."""


class ChannelTimeout(ChannelError):
    """No whole message arrived before the deadline."""


class ChannelGarbage(ChannelError):
    """What arrived is too long, or no JSON object."""


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
        sock.sendall(_LENGTH.pack(len(payload)) + payload)
    except TimeoutError as error:
        raise ChannelTimeout("the other side does not read") from error
    except OSError as error:
        raise ChannelClosed(f"cannot send: {error}") from error


def receive(sock: socket.socket, timeout_s: float | None = None, limit: int = MAX_FRAME_BYTES) -> dict:
    """Receive one frame within `timeout_s` in all; `None` waits for ever.

    Raises:
        ChannelClosed: the other side is gone.
        ChannelTimeout: the time is up.
        ChannelGarbage: the frame is longer than `limit` bytes or holds no JSON object.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, deadline))
    if length > limit:
        raise ChannelGarbage(f"a frame announces {length} bytes, the limit is {limit}")
    return _decode(_receive_exactly(sock, length, deadline))


def _receive_exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise ChannelTimeout("no answer in time")
        try:
            sock.settimeout(remaining)
            chunk = sock.recv(min(size - len(chunks), 1 << 20))
        except TimeoutError as error:
            raise ChannelTimeout("no answer in time") from error
        except OSError as error:
            raise ChannelClosed(f"cannot receive: {error}") from error
        if not chunk:
            raise ChannelClosed("closed in the middle of a message" if chunks else "closed")
        chunks += chunk
    return bytes(chunks)


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
        ChannelGarbage: not a JSON object.
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
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ChannelGarbage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ChannelGarbage("not a JSON object")
    return message
