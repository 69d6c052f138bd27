"""One AppWorld environment server: its address, and requests to it with a deadline.

Every question has a connection of its own. So a server that died between two questions is never mistaken for one that
died while it ran code. The environment's proxy variables have no effect.
"""

import contextlib
import http.client
import json
import re
import time
from typing import Any
from urllib.parse import quote, urlsplit

from gvpo_trl.environments.appworld.http.bounds import PIECE_BYTES, BoundedSocket
from gvpo_trl.environments.appworld.wire import frames
from gvpo_trl.faults import SetupError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Longest answer to a question that runs no agent code."""
MAX_HEAD_BYTES = 256 * 1024
"""Bytes that a server may send before the body of its answer."""
MAX_ANSWER_VALUES = 1_000_000
"""Values in an answer to a question that runs no agent code; each takes some 60 bytes of memory."""
MAX_STEP_VALUES = 1000
"""Values in the answer to a step, which holds one text."""
CONNECT_TIMEOUT_S = 10.0
_OUTPUT = b'{"output":"'
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_GATEWAY_STATUS = (502, 503, 504)
"""What a proxy answers when there is no server behind it."""


class ServerError(Exception):
    """A question got no proper answer."""


class ServerLost(ServerError):
    """Nothing listens at the address, or the connection ended without an answer."""


class ServerSilent(ServerError):
    """No whole answer arrived before the deadline."""


class ServerGarbage(ServerError):
    """The answer is not that of an AppWorld environment server."""


class ServerRefused(ServerError):
    """The server answered with a bare status 500, as AppWorld does after nearly every error."""


class Server:
    """A server's address, and the questions that it can be asked.

    Args:
        url: `http://host:port` or `https://host:port`, with a path where a proxy needs one.

    Raises:
        SetupError: `url` is no such address.
    """

    def __init__(self, url: str) -> None:
        problem = "must be a text like 'http://127.0.0.1:8001'"
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
            port = parts.port if parts else None
        except ValueError as error:
            parts, problem = None, f"is malformed: {error}"
        if parts and parts.scheme not in ("http", "https"):
            parts, problem = None, "must begin with http:// or https://"
        if parts and not parts.hostname:
            parts, problem = None, "names no host"
        if parts and (parts.query or parts.fragment or parts.username is not None):
            parts, problem = None, "must be an address alone, without a user name, '?' or '#'"
        if not parts:
            raise SetupError(
                f"url={url!r} {problem}; give the address of a running `appworld serve environment --port 8001`"
            )
        self.url = url
        self._https = parts.scheme == "https"
        self._address = (parts.hostname, port or (443 if self._https else 80))
        self._path = parts.path.rstrip("/")

    @property
    def identity(self) -> tuple:
        """The address in a form that is equal for two spellings of it."""
        host, port = self._address
        return ("loopback" if host in _LOOPBACK else host, port, self._path)

    def ask(self, path: str, body: dict | None = None, *, timeout_s: float) -> Any:
        """Ask one question: with POST where there is a body, and else with GET.

        Args:
            path: the endpoint's path, e.g. `"/execute"`.
            body: a JSON object.
            timeout_s: deadline of the whole exchange.

        Returns:
            The value of `output` in the answer to a POST; the whole answer to a GET.

        Raises:
            ServerError: there was no proper answer.
        """
        data, whole = self._exchange(path, body, timeout_s, MAX_ANSWER_BYTES)
        if not whole:
            raise ServerGarbage(f"{path} answered with more than {MAX_ANSWER_BYTES} bytes")
        if sum(map(data.count, (b"[", b"{", b","))) > MAX_ANSWER_VALUES:
            raise ServerGarbage(f"{path} answered with more than {MAX_ANSWER_VALUES} values")
        answer = _parse(path, data)
        if body is None:
            return answer
        if "output" not in answer:
            raise ServerGarbage(f"{path} answered without an output: {_excerpt(data)}")
        return answer["output"]

    def execute(self, task_id: str, code: str, *, timeout_s: float, max_chars: int) -> tuple[str, bool]:
        """Run code in the open world.

        Returns:
            AppWorld's text, and whether it is complete. A text longer than `max_chars` may be cut, since agent code
            can print more than the trainer has memory for.

        Raises:
            ServerError: there was no proper answer.
        """
        # JSON needs at most six bytes for a character.
        limit = 6 * max_chars + 65536
        data, whole = self._exchange("/execute", {"task_id": task_id, "code": code}, timeout_s, limit)
        if whole:
            try:
                frames.check_nodes(data, MAX_STEP_VALUES)
            except frames.TooManyNodes as error:
                raise ServerGarbage(f"/execute answered with {error}") from error
        text = _parse("/execute", data).get("output") if whole else text_beginning(data)
        if not isinstance(text, str):
            raise ServerGarbage(f"/execute answered without a text: {_excerpt(data)}")
        return text, whole

    def knows(self, task_id: str, *, timeout_s: float) -> bool:
        """Whether the task is in the server's data root."""
        try:
            self.ask(f"/tasks/{quote(task_id, safe='')}", timeout_s=timeout_s)
        except (ServerRefused, ServerGarbage):
            return False
        return True

    def _exchange(self, path: str, body: dict | None, timeout_s: float, limit: int) -> tuple[bytes, bool]:
        """Ask one question; return the answer's body, or at least its first `limit` bytes, and if it is complete."""
        deadline = time.monotonic() + timeout_s
        make = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = make(*self._address, timeout=min(timeout_s, CONNECT_TIMEOUT_S))
        with contextlib.ExitStack() as stack:
            try:
                connection.connect()
                stack.callback(connection.sock.close)
                connection.sock = sock = BoundedSocket(connection.sock, deadline, MAX_HEAD_BYTES)
                headers = {"Content-Type": "application/json", "Connection": "close"}
                payload = None if body is None else json.dumps(body).encode()
                connection.request("GET" if body is None else "POST", self._path + path, payload, headers)
            except OSError as error:
                raise ServerLost(f"cannot be reached: {error or type(error).__name__}") from error
            try:
                response = stack.enter_context(connection.getresponse())
                sock.allow(2 * limit + MAX_HEAD_BYTES)  # in chunks, a body is longer than its content
                data, whole = _read(response, limit)
            except TimeoutError as error:
                raise ServerSilent(f"{path} was not answered within {timeout_s:g} s") from error
            except ConnectionError as error:
                raise ServerLost(f"{path}: the connection ended without an answer") from error
            except (http.client.HTTPException, OSError) as error:
                raise ServerGarbage(f"{path}: {type(error).__name__}: {error}") from error
        if response.status in _GATEWAY_STATUS:
            raise ServerLost(f"{path}: status {response.status}")
        if response.status == 500:
            raise ServerRefused(f"{path} was answered with status 500")
        if response.status != 200:
            raise ServerGarbage(f"{path} was answered with status {response.status}: {_excerpt(data)}")
        return data, whole


def _read(response: http.client.HTTPResponse, limit: int) -> tuple[bytes, bool]:
    """Return the body and `True`, or the beginning of one that is longer than `limit` bytes and `False`."""
    data = bytearray()
    while len(data) <= limit:
        chunk = response.read1(PIECE_BYTES)
        if not chunk:
            if response.length:
                raise http.client.IncompleteRead(bytes(data[-80:]), response.length)
            return bytes(data), True
        data += chunk
    return bytes(data), False


def _parse(path: str, data: bytes) -> dict:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerGarbage(f"{path} answered with something else than JSON: {_excerpt(data)}") from error
    if not isinstance(answer, dict):
        raise ServerGarbage(f"{path} answered with something else than an object: {_excerpt(data)}")
    return answer


def text_beginning(data: bytes) -> str | None:
    """Return the text in the beginning of `{"output": "…"}`, without a character that is cut in two."""
    if not data.startswith(_OUTPUT):
        return None
    text = data.decode("utf-8", "ignore")
    # The cut can lie within `\u0001`, or between two backslashes.
    for cut in range(7):
        try:
            return json.loads(text[: len(text) - cut] + '"}')["output"]
        except ValueError:
            continue
    return None


def _excerpt(data: bytes) -> str:
    return repr(re.sub(r"\s+", " ", data[:200].decode("utf-8", "replace")))
