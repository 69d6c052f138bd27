"""Opens the worlds of the next batch while the model trains on this one. All of it runs in the trainer's process.

The trainer reads one batch ahead (`Lookahead`) and tells `Prefetch` which batches come next. When a rollout is over
and its worlds are closed, `Prefetch` asks the environment to open the episodes of the batch after it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from gvpo_trl.environments.base import Environment

_T = TypeVar("_T")


class Lookahead(Iterator[_T], Generic[_T]):
    """An iterator whose next element can be looked at before it is taken."""

    def __init__(self, source: Iterator[_T]):
        self.source = source
        self._read: list[_T] = []

    def __next__(self) -> _T:
        return self._read.pop() if self._read else next(self.source)

    def peek(self) -> list[_T]:
        """Return a list of the next element, which is empty at the end."""
        if not self._read:
            self._read = list(islice(self.source, 1))
        return list(self._read)


class Prefetch:
    """Asks an environment to open the episodes of the batch that follows the one rolled out last.

    Args:
        environment: the environment, whose method `prefetch(task_ids)` is called if it has one.
    """

    def __init__(self, environment: Environment):
        ask = getattr(environment, "prefetch", None)
        self._ask = ask if callable(ask) else None
        self._upcoming: list[list[str]] = []
        self.rolled_out_last: list[str] | None = None
        """Tasks of the batch that was rolled out last; a run that resumes sets them again."""

    def expect(self, batches: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Take note of the rows of the batches that the trainer takes next, in their order.

        A batch that the trainer takes several times in a row, to train again on the same trajectories, counts once,
        because it is rolled out once.
        """
        upcoming: list[list[str]] = []
        for rows in batches:
            task_ids = [row.get("task_id") for row in rows]
            if None not in task_ids and task_ids not in upcoming[-1:]:
                upcoming.append(task_ids)
        self._upcoming = upcoming
        if upcoming[:1] == [self.rolled_out_last]:
            self.rolled_out(upcoming[0])

    def rolled_out(self, task_ids: list[str]) -> None:
        """Take note that the rollout of a batch is over, and ask for the batch after it if that is known."""
        self.rolled_out_last = task_ids
        if task_ids in self._upcoming:
            del self._upcoming[: self._upcoming.index(task_ids) + 1]
        if self._ask is not None and self._upcoming:
            self._ask(self._upcoming[0])
