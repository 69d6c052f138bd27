"""`SqlEnvironments`: opens episodes in the trainer's process, and sends their steps to worker processes.

An episode has no state but its answer, so any worker can run any step. A worker that is late is ended, and the step
gets the verdict `TIMEOUT`. A worker that dies is replaced once; if the next one dies as well, the step is a fault.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.environments.sql.engine import Limits, right_values
from gvpo_trl.environments.sql.tasks import load_task
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault, HostFault, ProtocolFault

SCHEMA_CALL = "api_docs.schema"
"""What `api_calls` says of a step that read the schema, so that it counts as a look into the docs."""
GRACE_S = 2.0
"""Seconds that a worker has for its answer after the step's deadline, before it is ended."""
START_S = 60.0
"""Seconds that a worker may take until it is ready."""
MAX_ANSWER_BYTES = 4_000_000


class SqlEnvironments:
    """Episodes in which an agent answers a question with SQL.

    Args:
        max_episodes: how many episodes may be open at once; `open` waits for a place.
        workers: the most processes that run steps; by default one for each core, and at least two.
        step_timeout_s: seconds that a step may take.
        max_operations: operations of SQLite's virtual machine that a step may take. This limit is reached first, so
            that the verdict does not depend on the load of the machine.
        max_rows: rows that a statement shows.

    Raises:
        ValueError: an argument is out of range.
    """

    languages = ("sql", "sqlite")
    """Labels of the fenced blocks that hold an agent's code."""

    def __init__(
        self,
        max_episodes: int = 16,
        workers: int | None = None,
        step_timeout_s: float = 5.0,
        max_operations: int = 2_000_000,
        max_rows: int = 8,
    ):
        workers = max(2, os.cpu_count() or 1) if workers is None else workers
        for name, value in {
            "max_episodes": max_episodes,
            "workers": workers,
            "step_timeout_s": step_timeout_s,
            "max_operations": max_operations,
            "max_rows": max_rows,
        }.items():
            if value <= 0:
                raise ValueError(f"{name}={value} must be greater than 0")
        self.max_episodes, self.step_timeout_s = max_episodes, step_timeout_s
        self._limits = Limits(operations=max_operations, seconds=step_timeout_s, rows=max_rows)
        self._places = threading.Semaphore(max_episodes)
        self._workers = _Workers(min(workers, max_episodes), self._limits)

    def __enter__(self) -> "SqlEnvironments":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a worker, so that a mistake in the set-up shows before the first episode.

        Raises:
            HostFault: the worker does not start.
        """
        with self._workers.lent():
            pass

    def open(self, task_id: str) -> "SqlEpisode":
        """Open a fresh episode of a task; waits while `max_episodes` are open.

        Raises:
            SetupError: the task is unknown.
            HostFault: the environment is closed.
        """
        started = time.perf_counter()
        task = load_task(task_id)
        self._places.acquire()
        if self._workers.closed:
            self._places.release()
            raise HostFault("this environment is closed; make a new one")
        reset = ResetResult(task_id=task_id, seconds=time.perf_counter() - started)
        return SqlEpisode(reset, task.parts, task.answer, self._workers, self._places.release)

    def close(self) -> None:
        """End every worker; idempotent."""
        self._workers.close()


class SqlEpisode:
    """One attempt at a question. The first answer that a step gives is the answer of the episode."""

    def __init__(
        self,
        reset: ResetResult,
        parts: Sequence[str],
        expected: Sequence[int | str],
        workers: "_Workers",
        release: Callable[[], None],
    ):
        self.reset = reset
        self._parts, self._expected, self._workers, self._release = parts, expected, workers, release
        self._answer: list | None = None
        self._lock = threading.Lock()
        self._scored = self._closed = False

    def step(self, code: str) -> StepResult:
        """Run the SQL of a turn.

        Raises:
            EnvironmentFault: the episode is over, or its step cannot be run.
        """
        self._check_open()
        result = self._workers.run(self.reset.task_id, code)
        if self._answer is None:
            self._answer = result["answer"]
        return StepResult(
            text=result["text"],
            failure=None if result["failure"] is None else FailureKind(result["failure"]),
            completed=self._answer is not None,
            api_calls=(SCHEMA_CALL,) if result["read_schema"] else (),
        )

    def score(self) -> Score:
        """Compare the answer with the right one, value by value.

        Raises:
            EpisodeFault: the episode is over.
        """
        self._check_open()
        self._scored = True
        right = right_values(self._answer, self._expected)
        passed = tuple(part for part, is_right in zip(self._parts, right, strict=True) if is_right)
        failed = tuple(part for part, is_right in zip(self._parts, right, strict=True) if not is_right)
        return Score(passed=passed, failed=failed)

    def close(self) -> None:
        """Give the episode's place to another one; idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._release()

    def _check_open(self) -> None:
        if self._closed or self._scored:
            raise EpisodeFault("the episode is over")


class _WorkerLate(Exception):
    """A worker has not answered in time, and was ended."""


class _Worker:
    """A process that runs steps, one at a time."""

    def __init__(self, limits: Limits):
        package = Path(__file__).resolve().parents[3]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gvpo_trl.environments.sql.worker", json.dumps(asdict(limits)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=package,
            env={"PYTHONPATH": str(package), "PATH": os.environ.get("PATH", "")},  # no secret of the trainer
            start_new_session=True,
        )
        self._seconds = limits.seconds
        try:
            self._receive(START_S)
        except (OSError, _WorkerLate) as error:
            self.end()
            raise HostFault(f"a worker for SQL did not start (exit code {self._process.returncode})") from error

    def ask(self, request: dict) -> dict:
        """Run a step and return its result.

        Raises:
            OSError: the worker has died.
            _WorkerLate: the step is past its deadline.
            ProtocolFault: the answer is too long, or no JSON.
        """
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._receive(self._seconds + GRACE_S)

    def _receive(self, seconds: float) -> dict:
        deadline, data = time.monotonic() + seconds, b""
        while not data.endswith(b"\n"):
            ready = select.poll()
            ready.register(self._process.stdout, select.POLLIN)
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _WorkerLate
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise BrokenPipeError("the worker has died")
            data += chunk
            if len(data) > MAX_ANSWER_BYTES:
                raise ProtocolFault(f"an answer of a worker has more than {MAX_ANSWER_BYTES} bytes")
        try:
            return json.loads(data)
        except ValueError as error:
            raise ProtocolFault("an answer of a worker is no JSON") from error

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class _Workers:
    """Lends workers to steps, and starts them when they are needed.

    The kernel ends a worker when the thread that started it ends, so one thread that lives as long as the environment
    starts them all.
    """

    def __init__(self, limit: int, limits: Limits):
        self._limits = limits
        self._places = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sql-workers")
        self.closed = False

    def run(self, task_id: str, code: str) -> dict:
        """Run a step; start again on another worker if the first one dies.

        Raises:
            EnvironmentFault: no worker could run the step.
        """
        for _ in range(2):
            with self.lent() as worker:
                try:
                    return worker.ask({"task_id": task_id, "code": code})
                except _WorkerLate:
                    self._drop(worker)
                    text = "Error: the step takes too long"
                    return {"text": text, "failure": "timeout", "answer": None, "read_schema": False}
                except ProtocolFault:
                    self._drop(worker)
                    raise
                except (OSError, ValueError):  # ValueError: its pipe was closed when the environment was.
                    self._drop(worker)
        raise EpisodeFault("two workers died on the same step")

    @contextmanager
    def lent(self) -> Iterator[_Worker]:
        """Lend a worker to the calling thread; waits while all are in use.

        Raises:
            HostFault: the environment is closed, or a worker does not start.
        """
        with self._places:
            with self._lock:
                if self.closed:
                    raise HostFault("this environment is closed; make a new one")
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = self._start()
            try:
                yield worker
            finally:
                with self._lock:
                    if worker in self._all:
                        self._idle.append(worker)

    def _start(self) -> _Worker:
        try:
            worker = self._starter.submit(_Worker, self._limits).result()
        except (RuntimeError, OSError) as error:  # RuntimeError: the environment was closed meanwhile.
            raise HostFault(f"a worker for SQL could not be started: {error}") from error
        with self._lock:
            self._all.add(worker)
        if self.closed:
            self._drop(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            known = worker in self._all
            self._all.discard(worker)
        if known:
            worker.end()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            workers = list(self._all)
        self._starter.shutdown()
        for worker in workers:
            self._drop(worker)
