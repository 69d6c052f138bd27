"""The pool of servers. It leases them, leaves alone those that hang or died, and raises when none is left."""

import enum
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gvpo_trl.environments.appworld.http.server import Server, ServerError, ServerLost, ServerSilent
from gvpo_trl.faults import EnvironmentsExhausted, HostFault, SetupError
from gvpo_trl.text import printable_line

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
"""Deadline of a question that only finds out whether a server answers."""
PROBE_AGAIN_S = 0.5
"""Time between two questions to a server that hangs, or that `wait_for_any` waits for."""
BACK_OFF_S = 1.0
"""Time before a dead server is asked again; it doubles with every further failure."""
LONGEST_BACK_OFF_S = 30.0
"""Longest time before a dead server is asked again."""


class State(enum.Enum):
    """What a server is doing, as far as this side knows."""

    FREE = enum.auto()
    LEASED = enum.auto()
    PROBED = enum.auto()
    """A thread is finding out whether the server answers."""
    DOWN = enum.auto()
    """The server died, hangs, or breaks the protocol."""


@dataclass(kw_only=True, slots=True, eq=False)
class PoolEntry:
    """A server and what is known of it."""

    server: Server
    number: int
    """Index in the list of addresses."""
    state: State = State.FREE
    clean: bool = False
    """Whether the server's process holds nothing of an earlier episode, as far as we can clean it."""
    failures: int = 0
    """How often it has failed since its last scored episode."""
    retry_at: float = 0.0
    """Time of the monotonic clock from which on a server that is down may be asked again."""
    hangs_until: float = 0.0
    """Time of the monotonic clock until which a server that does not answer counts as busy and not as dead."""
    cause: str = ""
    """Why the server is down."""


class Pool:
    """Leases servers, each to one episode at a time. Thread-safe.

    Args:
        servers: different servers.
        max_restarts: how often in a row every server may fail before `lease` gives up for good.
        hang_limit_s: how long a server may stay silent before it counts as dead.
    """

    def __init__(self, servers: Sequence[Server], max_restarts: int, hang_limit_s: float) -> None:
        self.entries = [PoolEntry(server=server, number=number) for number, server in enumerate(servers)]
        self.max_restarts = max_restarts
        self.hang_limit_s = hang_limit_s
        self._changed = threading.Condition()
        self.closed = False
        self._last_cause = "none"

    def lease(self, wait_s: float | None = None) -> PoolEntry:
        """Wait for a free server and lease it.

        Raises:
            HostFault: no server is alive, the environment is closed, or `wait_s` is over.
            EnvironmentsExhausted: every server failed more than `max_restarts` times in a row.
        """
        give_up_at = None if wait_s is None else time.monotonic() + wait_s
        while True:
            with self._changed:
                entry = self._take(give_up_at)
            if entry.state is State.LEASED or self._answers(entry):
                return entry

    def _take(self, give_up_at: float | None) -> PoolEntry:
        """Wait for a server that is free, which is then leased, or for one that is due to be asked again."""
        while True:
            if self.closed:
                raise HostFault("the environment is closed")
            now = time.monotonic()
            for entry in self.entries:
                if entry.state is State.FREE:
                    entry.state = State.LEASED
                    return entry
            down = [entry for entry in self.entries if entry.state is State.DOWN]
            for entry in down:
                if entry.retry_at <= now:
                    entry.state = State.PROBED
                    return entry
            self._check_alive(exhausted_only=True)
            if give_up_at is not None and now >= give_up_at:
                raise HostFault("no server became free in time")
            times = [entry.retry_at for entry in down] + ([] if give_up_at is None else [give_up_at])
            self._changed.wait(min(times) - now if times else None)

    def _answers(self, entry: PoolEntry) -> bool:
        try:
            entry.server.ask("/", timeout_s=PROBE_TIMEOUT_S)
        except BaseException as error:
            with self._changed:
                entry.state = State.DOWN
                if time.monotonic() < entry.hangs_until:
                    entry.retry_at = time.monotonic() + PROBE_AGAIN_S
                else:
                    entry.hangs_until = 0.0
                    self._note_failure(entry, error)
                self._changed.notify_all()
                if not isinstance(error, ServerError):
                    raise
                self._check_alive()
            return False
        logger.warning("AppWorld server %s answers again", entry.server.url)
        with self._changed:
            entry.state, entry.hangs_until = State.LEASED, 0.0
        return True

    def check_alive(self) -> None:
        """Raise as `lease` does when no server is alive."""
        with self._changed:
            self._check_alive()

    def _check_alive(self, exhausted_only: bool = False) -> None:
        now = time.monotonic()
        if any(entry.state is not State.DOWN or now < entry.hangs_until for entry in self.entries):
            return
        if all(entry.failures > self.max_restarts for entry in self.entries):
            raise EnvironmentsExhausted(
                f"no AppWorld server came back after {self.max_restarts} tries each; last cause: {self._last_cause}"
            )
        if not exhausted_only:
            raise HostFault(f"no AppWorld server is alive; last cause: {self._last_cause}")

    def failed(self, entry: PoolEntry, cause: Exception) -> None:
        """Note that a leased server died or did not answer as an AppWorld server does; it is asked again later."""
        with self._changed:
            self._note_failure(entry, cause)
            self._changed.notify_all()

    def _note_failure(self, entry: PoolEntry, cause: BaseException) -> None:
        entry.state, entry.clean = State.DOWN, False
        entry.failures += 1
        wait_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (entry.failures - 1))
        entry.retry_at = time.monotonic() + wait_s
        entry.cause = self._last_cause = printable_line(f"{entry.server.url}: {cause}")
        logger.warning("AppWorld server %s; asked again in %g s", entry.cause, wait_s)

    def hangs(self, entry: PoolEntry, cause: Exception) -> None:
        """Note that a leased server does not answer; it is not leased before it answers again."""
        with self._changed:
            entry.state, entry.clean = State.DOWN, False
            entry.retry_at = time.monotonic() + PROBE_AGAIN_S
            entry.hangs_until = time.monotonic() + self.hang_limit_s
            entry.cause = self._last_cause = printable_line(f"{entry.server.url}: {cause}")
            logger.warning("AppWorld server %s; left alone until it answers", entry.cause)
            self._changed.notify_all()

    def give_back(self, entry: PoolEntry, clean: bool) -> None:
        """End a lease."""
        with self._changed:
            entry.state, entry.clean = State.FREE, clean
            self._changed.notify_all()

    def succeeded(self, entry: PoolEntry) -> None:
        """Forgive a server its earlier failures, because an episode on it was scored."""
        entry.failures = 0

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until every server answers; servers that do not answer by then are down.

        Raises:
            SetupError: one of them is no AppWorld server.
            HostFault: no server answers.
        """
        stopped = threading.Event()

        def wait(entry: PoolEntry) -> None:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    greeting = entry.server.ask("/", timeout_s=PROBE_TIMEOUT_S)
                except (ServerLost, ServerSilent) as error:
                    if time.monotonic() >= deadline:
                        return self.failed(entry, error)
                    if stopped.wait(PROBE_AGAIN_S):
                        return None
                except ServerError as error:
                    return self.failed(entry, error)
                else:
                    break
            if "AppWorld" not in str(greeting.get("message")):
                raise SetupError(
                    f"url={entry.server.url!r} is no AppWorld environment server; "
                    "start one with `appworld serve environment --port 8001`"
                )
            return self.give_back(entry, clean=entry.clean)

        with self._changed:
            waiting = [entry for entry in self.entries if entry.state is State.FREE]
            for entry in waiting:
                entry.state = State.PROBED
        try:
            with ThreadPoolExecutor(len(self.entries)) as threads:
                try:
                    list(threads.map(wait, waiting))
                finally:
                    stopped.set()
        finally:
            for entry in waiting:
                if entry.state is State.PROBED:
                    self.give_back(entry, clean=False)
        self.check_alive()

    def close(self) -> None:
        """Make every waiting or later call of `lease` raise a `HostFault`; idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
