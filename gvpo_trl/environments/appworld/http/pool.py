"""Who has which server: leases, servers that hang, died or came back, and when to give up."""

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
PROBE_AGAIN_S = 0.5
"""Between two looks at a server that hangs, or that `wait_for_any` waits for."""
BACK_OFF_S = 1.0
"""Before a dead server is asked again; doubles with every further failure."""
LONGEST_BACK_OFF_S = 30.0


class State(enum.Enum):
    """What a server is doing, as far as this side knows."""

    FREE = enum.auto()
    LEASED = enum.auto()
    PROBED = enum.auto()
    DOWN = enum.auto()


@dataclass(kw_only=True, slots=True, eq=False)
class Place:
    """A server and what is known of it."""

    server: Server
    number: int
    state: State = State.FREE
    clean: bool = False
    """Whether nothing of an earlier episode is left in its process that is known to disturb the next."""
    failures: int = 0
    """Since its last scored episode."""
    retry_at: float = 0.0
    """When a server that is down may be asked again, on the monotonic clock."""
    hangs_until: float = 0.0
    """Until when a server that does not answer counts as busy rather than dead."""
    cause: str = ""
    """Why it is down."""


class Pool:
    """Leases of servers, one episode each. Thread-safe.

    Args:
        servers: distinct ones.
        max_restarts: how often in a row every server may fail before `lease` gives up for good.
        hang_limit_s: how long a server may stay silent before it counts as dead.
    """

    def __init__(self, servers: Sequence[Server], max_restarts: int, hang_limit_s: float) -> None:
        self.places = [Place(server=server, number=number) for number, server in enumerate(servers)]
        self.max_restarts = max_restarts
        self.hang_limit_s = hang_limit_s
        self._changed = threading.Condition()
        self.closed = False
        self._last_cause = "none"

    def lease(self, wait_s: float | None = None) -> Place:
        """A server for one episode; waits until one is free.

        Raises:
            HostFault: no server is alive, the environment is closed, or `wait_s` is over.
            EnvironmentsExhausted: every server failed more than `max_restarts` times in a row.
        """
        give_up_at = None if wait_s is None else time.monotonic() + wait_s
        while True:
            with self._changed:
                place = self._take(give_up_at)
            if place.state is State.LEASED or self._answers(place):
                return place

    def _take(self, give_up_at: float | None) -> Place:
        """A free server, leased, or one that is down and due to be asked again."""
        while True:
            if self.closed:
                raise HostFault("the environment is closed")
            now = time.monotonic()
            for place in self.places:
                if place.state is State.FREE:
                    place.state = State.LEASED
                    return place
            down = [place for place in self.places if place.state is State.DOWN]
            for place in down:
                if place.retry_at <= now:
                    place.state = State.PROBED
                    return place
            self._check_alive(exhausted_only=True)
            if give_up_at is not None and now >= give_up_at:
                raise HostFault("no server became free in time")
            times = [place.retry_at for place in down] + ([] if give_up_at is None else [give_up_at])
            self._changed.wait(min(times) - now if times else None)

    def _answers(self, place: Place) -> bool:
        try:
            place.server.ask("/", timeout_s=PROBE_TIMEOUT_S)
        except BaseException as error:
            with self._changed:
                place.state = State.DOWN
                if time.monotonic() < place.hangs_until:
                    place.retry_at = time.monotonic() + PROBE_AGAIN_S
                else:
                    place.hangs_until = 0.0
                    self._note_failure(place, error)
                self._changed.notify_all()
                if not isinstance(error, ServerError):
                    raise
                self._check_alive()
            return False
        logger.warning("AppWorld server %s answers again", place.server.url)
        with self._changed:
            place.state, place.hangs_until = State.LEASED, 0.0
        return True

    def check_alive(self) -> None:
        """Raise what `lease` would when no server is alive."""
        with self._changed:
            self._check_alive()

    def _check_alive(self, exhausted_only: bool = False) -> None:
        now = time.monotonic()
        if any(place.state is not State.DOWN or now < place.hangs_until for place in self.places):
            return
        if all(place.failures > self.max_restarts for place in self.places):
            raise EnvironmentsExhausted(
                f"no AppWorld server came back after {self.max_restarts} tries each; last cause: {self._last_cause}"
            )
        if not exhausted_only:
            raise HostFault(f"no AppWorld server is alive; last cause: {self._last_cause}")

    def failed(self, place: Place, cause: Exception) -> None:
        """A leased server died, or answered what no AppWorld server answers: it is asked again later."""
        with self._changed:
            self._note_failure(place, cause)
            self._changed.notify_all()

    def _note_failure(self, place: Place, cause: BaseException) -> None:
        place.state, place.clean = State.DOWN, False
        place.failures += 1
        wait_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (place.failures - 1))
        place.retry_at = time.monotonic() + wait_s
        place.cause = self._last_cause = printable_line(f"{place.server.url}: {cause}")
        logger.warning("AppWorld server %s; asked again in %g s", place.cause, wait_s)

    def hangs(self, place: Place, cause: Exception) -> None:
        """A leased server does not answer: nobody gets it before it does."""
        with self._changed:
            place.state, place.clean = State.DOWN, False
            place.retry_at = time.monotonic() + PROBE_AGAIN_S
            place.hangs_until = time.monotonic() + self.hang_limit_s
            place.cause = self._last_cause = printable_line(f"{place.server.url}: {cause}")
            logger.warning("AppWorld server %s; left alone until it answers", place.cause)
            self._changed.notify_all()

    def give_back(self, place: Place, clean: bool) -> None:
        """The end of a lease."""
        with self._changed:
            place.state, place.clean = State.FREE, clean
            self._changed.notify_all()

    def succeeded(self, place: Place) -> None:
        """An episode was scored: earlier failures don't count any more."""
        place.failures = 0

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until every server answers, at most so long; the ones that don't are down.

        Raises:
            SetupError: something else than an AppWorld server answers.
            HostFault: no server answers.
        """
        stopped = threading.Event()

        def wait(place: Place) -> None:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    greeting = place.server.ask("/", timeout_s=PROBE_TIMEOUT_S)
                except (ServerLost, ServerSilent) as error:
                    if time.monotonic() >= deadline:
                        return self.failed(place, error)
                    if stopped.wait(PROBE_AGAIN_S):
                        return None
                except ServerError as error:
                    return self.failed(place, error)
                else:
                    break
            if "AppWorld" not in str(greeting.get("message")):
                raise SetupError(
                    f"url={place.server.url!r} is no AppWorld environment server; "
                    "start one with `appworld serve environment --port 8001`"
                )
            return self.give_back(place, clean=place.clean)

        with self._changed:
            waiting = [place for place in self.places if place.state is State.FREE]
            for place in waiting:
                place.state = State.PROBED
        try:
            with ThreadPoolExecutor(len(self.places)) as threads:
                try:
                    list(threads.map(wait, waiting))
                finally:
                    stopped.set()
        finally:
            for place in waiting:
                if place.state is State.PROBED:
                    self.give_back(place, clean=False)
        self.check_alive()

    def close(self) -> None:
        """Whoever waits for a server, and whoever asks for one from now on, gets a `HostFault`; idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
