"""The places for open episodes. Their number is fixed, and free ones are used to open episodes in advance."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gvpo_trl.environments.appworld.episodes import AppWorldEpisode
from gvpo_trl.faults import EnvironmentFault, HostFault, SetupError

THREADS = 2
"""Threads that open episodes in advance at a time."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Opening:
    """An episode that is being opened in advance."""

    task_id: str
    wanted: bool = True
    """Whether the latest call of `prefetch` asked for it."""


class Places:
    """Holds at most `count` open episodes; thread-safe. Callers of `take` go before episodes opened in advance.

    Args:
        count: how many episodes may be open at once, the ones that wait to be handed out included.
        open_episode: opens an episode of a task. It is given the task and a function that the episode has to call
            once when it is closed, which frees its place.
    """

    def __init__(self, count: int, open_episode: Callable[[str, Callable[[], None]], AppWorldEpisode]) -> None:
        self._count = count
        self._open_episode = open_episode
        self._changed = threading.Condition()
        self._taken = 0
        self._ready: list[AppWorldEpisode] = []
        self._opening: list[_Opening] = []
        self._wanted: Counter[str] = Counter()  # task -> episodes that are still to be opened in advance
        self._callers = 0  # threads that wait in `take`
        self._threads = 0  # threads that open episodes in advance
        self._closed = False

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._taken

    @property
    def ready(self) -> tuple[AppWorldEpisode, ...]:
        """The episodes that were opened in advance and wait to be handed out."""
        with self._changed:
            return tuple(self._ready)

    @property
    def busy(self) -> bool:
        """Whether an episode is being opened in advance."""
        return self._threads > 0

    def take(self, task_id: str) -> AppWorldEpisode:
        """Wait for a place, and return the task's episode that was opened in advance, or else a new one.

        Raises:
            HostFault: the places were closed.
            SetupError, EnvironmentFault: whatever opening the episode raises.
        """
        episode = self._wait_for_place(task_id)
        return self._open(task_id) if episode is None else episode

    def _wait_for_place(self, task_id: str) -> AppWorldEpisode | None:
        """Take a place, and return the episode that is already open in it, or `None`."""
        with self._changed:
            self._callers += 1
            try:
                while not self._closed:
                    for episode in self._ready:
                        if episode.task_id == task_id and not episode.lost:
                            self._ready.remove(episode)
                            return episode
                    if self._taken < self._count:
                        self._taken += 1
                        return None
                    if self._ready:
                        self._close_unlocked(self._ready.pop())  # this one will be needed last
                    else:
                        self._changed.wait()
                raise HostFault("the environment is closed")
            finally:
                self._callers -= 1
                self._start_threads()

    def _close_unlocked(self, episode: AppWorldEpisode) -> None:
        """Close an episode while others may take and free places; the lock is held before and after."""
        self._changed.release()
        try:
            episode.close()
        finally:
            self._changed.acquire()

    def _open(self, task_id: str) -> AppWorldEpisode:
        """Open an episode in a place that is already taken."""
        try:
            return self._open_episode(task_id, self._free)
        except BaseException:
            self._free()
            raise

    def _free(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
            self._start_threads()

    def prefetch(self, task_ids: Sequence[str]) -> None:
        """Open an episode of each of these tasks in the background, as soon as there is room, for `take`.

        A later call replaces what an earlier one asked for: episodes that are no longer wanted are closed. A task
        whose episode cannot be opened is left to `take`.
        """
        unwanted = []
        with self._changed:
            wanted = Counter(task_ids)
            for episode in list(self._ready):
                if wanted[episode.task_id] > 0 and not episode.lost:
                    wanted[episode.task_id] -= 1
                else:
                    self._ready.remove(episode)
                    unwanted.append(episode)
            for opening in self._opening:
                opening.wanted = wanted[opening.task_id] > 0
                wanted[opening.task_id] -= opening.wanted
            self._wanted = +wanted
            self._start_threads()
        for episode in unwanted:
            episode.close()

    def _start_threads(self) -> None:
        """Start threads for the wanted episodes that have room; the lock is held."""
        room = 0 if self._closed or self._callers else self._count - self._taken
        for _ in range(min(room, self._wanted.total(), THREADS - self._threads)):
            self._threads += 1
            threading.Thread(target=self._open_in_advance, name="prefetch", daemon=True).start()

    def _open_in_advance(self) -> None:
        """Open one wanted episode after the other, until none is wanted or no place is free for it."""
        while (opening := self._next_wanted()) is not None:
            episode = None
            try:
                episode = self._open(opening.task_id)
            except (EnvironmentFault, SetupError) as error:
                _log.debug("the episode of task %s could not be opened in advance: %s", opening.task_id, error)
            with self._changed:
                self._opening.remove(opening)
                if episode is None:
                    self._wanted.clear()
                    continue
                wanted = opening.wanted and not self._closed
                if wanted:
                    self._ready.append(episode)
                self._changed.notify_all()
            if not wanted:
                episode.close()

    def _next_wanted(self) -> _Opening | None:
        """Take a place for the next wanted episode; return `None` when this thread has no more to do."""
        with self._changed:
            self._wanted = +self._wanted
            full = self._taken >= self._count or self._callers > 0
            if self._closed or full or not self._wanted:
                self._threads -= 1
                return None
            task_id = next(iter(self._wanted))
            self._wanted[task_id] -= 1
            self._taken += 1
            self._opening.append(opening := _Opening(task_id))
            return opening

    def close(self) -> None:
        """Close the episodes that wait to be handed out; from now on `take` raises. Idempotent."""
        with self._changed:
            self._closed = True
            ready, self._ready = self._ready, []
            self._changed.notify_all()
        for episode in ready:
            episode.close()
