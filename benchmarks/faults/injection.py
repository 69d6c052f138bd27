"""Breaks the machinery below a rollout, at times drawn from a seed, and records which episodes each fault hit.

The package runs unchanged: processes are killed and stopped by signals, channels are cut and garbled at their own
descriptors, a disk is filled.
"""

import contextlib
import os
import random
import resource
import select
import signal
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.leftovers import descriptors
from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.children import Child
from gvpo_trl.environments.appworld.hosts import HostKeeper, HostProcess
from gvpo_trl.environments.base import ResetResult, Score, StepResult

OVERTIME_S = 2.0
"""Seconds that a step may take beyond its deadline."""
LONGEST_DELAY_S = 0.1
"""A fault strikes at most so many seconds after the start of an operation, or as soon as its process is there."""
HALF_A_MESSAGE = struct.pack(">I", 1000) + b'{"op": "en'
GARBAGE = b"\xff\xff\xff\xff no message"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One way in which the machinery breaks."""

    places: tuple[str, ...] = ("open", "step", "score")
    hits_all: bool = False
    """Whether it hits every open episode, and not only the one that it was drawn for."""


def machinery_faults(isolation: str, disk: bool) -> dict[str, Kind]:
    """Every kind of fault by name.

    A process that runs agent code can close its channel or hang because of its agent, which is not a fault. So such a
    process is only killed here. In split mode, worlds are processes without agent code.

    Args:
        isolation: the environments' mode; only `"split"` has interpreters with a host of their own.
        disk: whether there is a disk that can be filled.
    """
    found = {
        "host killed": Kind(hits_all=True),
        "host killed, and the next": Kind(hits_all=True),
        "host's channel cut": Kind(hits_all=True),
        "garbage to host": Kind(hits_all=True),
        "world killed": Kind(),
        "garbage to world": Kind(places=("step", "score")),
        "world cannot write": Kind(places=("open", "step")),
        "evaluator killed": Kind(places=("score",)),
        "evaluator stopped": Kind(places=("score",)),
        "saved state damaged": Kind(places=("score",)),
    }
    if isolation == "split":
        found |= {
            "agent host killed": Kind(hits_all=True),
            "garbage to agent host": Kind(hits_all=True),
            "interpreter killed": Kind(places=("open", "step")),
            "world stopped": Kind(places=("step",)),
            "world's channel cut": Kind(places=("step", "score")),
        }
    if disk:
        found["disk full"] = Kind(places=("score",), hits_all=True)
    return found


class RowTask(str):
    """A task's id that also holds the number of the row that asks for it; to environments it is a plain id."""

    __slots__ = ("row",)

    def __new__(cls, task_id: str, row: int) -> "RowTask":
        """The id with the row's number, counted over the whole run."""
        self = super().__new__(cls, task_id)
        self.row = row
        return self


@dataclass(slots=True)
class Plan:
    """The fault that is to strike one attempt."""

    kind: str
    place: str
    step: int | None
    """Which step, counted from 0, where `place` is `"step"`."""
    delay_s: float
    fired: bool = False


class FaultyEnvironments:
    """Environments whose machinery breaks at times drawn from a seed.

    Args:
        environments: the real environments, with a `max_restarts` that no run reaches.
        rate: probability of a fault per attempt at a row.
        seed: of all draws; the draws of a row do not depend on the other rows.
        disk: a small file system that holds the outputs, if there is one.
    """

    is_checked = True

    def __init__(self, environments: AppWorldEnvironments, *, rate: float, seed: int, disk: Path | None) -> None:
        self.environments = environments
        self.max_episodes = environments.max_episodes
        self.rate, self.seed, self.disk = rate, seed, disk
        self.kinds = machinery_faults(environments.isolation, disk is not None)
        self.injected: Counter[str] = Counter()
        self.attempts: dict[int, list[FaultyEpisode]] = defaultdict(list)
        """The episodes of each row, in order."""
        self.late: list[str] = []
        """The steps that took more than `OVERTIME_S` beyond their deadline."""
        self.lock = threading.RLock()
        self._here = threading.local()
        self.pool = ThreadPoolExecutor(4 * self.max_episodes, thread_name_prefix="fault")
        self._live: set[FaultyEpisode] = set()
        self._struck: dict[HostProcess, str] = {}
        self._full: list[str] = []
        self._spawn, self._take_evaluator = HostProcess.spawn, environments.machinery.evaluators.take
        HostProcess.spawn = self._watched_spawn()
        environments.machinery.evaluators.take = self._watched_evaluator

    def open(self, task_id: RowTask) -> "FaultyEpisode":
        """Open an episode of the row's task, with a fault drawn for it."""
        episode = FaultyEpisode(self, task_id, len(self.attempts[task_id.row]) + 1)
        with self.lock:
            self.attempts[task_id.row].append(episode)
            self._live.add(episode)
            hosts = [keeper.host for keeper in self.environments.machinery.keepers]
            unnoticed = [self._struck[host] for host in hosts if host in self._struck and not host.dead]
            episode.hits += self._full + unnoticed
        episode.open()
        return episode

    def close(self) -> None:
        """Wait for the faults that are being injected. The real environments stay open."""
        self.pool.shutdown()
        HostProcess.spawn = self._spawn
        self.environments.machinery.evaluators.take = self._take_evaluator

    def idle_evaluators(self) -> set[int]:
        """Ids of the evaluators that wait for their next task."""
        return {child.pid for child in self.environments.machinery.evaluators.idle}

    @contextlib.contextmanager
    def spawning_for(self, episode: "FaultyEpisode") -> Iterator[None]:
        """Attribute the processes that are forked for this thread during the block to the episode."""
        self._here.episode = episode
        try:
            yield
        finally:
            self._here.episode = None

    def _watched_spawn(self):
        """A `spawn` of hosts that tells the episode of this thread which processes were forked for it."""
        spawn, here = self._spawn, self._here

        def watched_spawn(host: HostProcess, request: dict, peer: socket.socket | None = None):
            number, pid, sock = spawn(host, request, peer)
            episode, kind = getattr(here, "episode", None), request["kind"]
            if episode is not None and kind != "evaluation":
                episode.started("world" if kind == "episode" else kind, pid)
            return number, pid, sock

        return watched_spawn

    def _watched_evaluator(self) -> Child:
        """Take an evaluator, which may have evaluated before, and tell this thread's episode its process."""
        episode = getattr(self._here, "episode", None)
        if episode is not None:
            episode.before_evaluation()
        child = self._take_evaluator()
        if episode is not None:
            episode.started("evaluation", child.pid)
        return child

    def draw(self, task_id: RowTask, attempt: int) -> Plan | None:
        """Draw the fault of an attempt at a row; `None` for no fault."""
        dice = random.Random(f"{self.seed}/{task_id.row}/{attempt}")
        if dice.random() >= self.rate:
            return None
        names = sorted(self.kinds)
        # A host's death hits every open episode and costs seconds, so one comes half as often as another kind.
        (kind,) = dice.choices(names, [1 if "host" in name else 2 for name in names])
        place = dice.choice(self.kinds[kind].places)
        step = dice.randrange(3) if place == "step" else None
        return Plan(kind, place, step, dice.uniform(0, LONGEST_DELAY_S))

    def record(self, kind: str, victim: "FaultyEpisode", host: HostProcess | None = None) -> str:
        """Record a fault and the episodes that it hits, right before it strikes; the fault's name."""
        with self.lock:
            self.injected[kind] += 1
            name = f"{kind} {self.injected[kind]}"
            if host is not None:
                self._struck[host] = name
            for episode in self._live if self.kinds[kind].hits_all else [victim]:
                episode.hits.append(name)
        return name

    def forget(self, episode: "FaultyEpisode") -> None:
        """Remove a closed episode, which no fault can hit any more."""
        with self.lock:
            self._live.discard(episode)

    def keeper(self, kind: str) -> HostKeeper:
        """The keeper of the host that a kind of fault breaks."""
        machinery = self.environments.machinery
        return machinery.agents if "agent host" in kind else machinery.worlds

    def strike_next_host(self, victim: "FaultyEpisode", before: HostProcess) -> None:
        """Kill the host that replaces `before`, while it warms up."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            host = self.environments.machinery.worlds.host
            if host is not None and host is not before:
                self.record("host killed, and the next", victim, host)
                host.process.kill()
                return
            time.sleep(0.01)

    @contextlib.contextmanager
    def full_disk(self, victim: "FaultyEpisode") -> Iterator[None]:
        """Fill the disk that holds the outputs for as long as the block runs."""
        with self.lock:
            name = self.record("disk full", victim)
            self._full.append(name)
            ballast = self.disk / name
            for size in (1 << 20, 512):
                with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
                    while True:
                        file.write(bytes(size))
        try:
            yield
        finally:
            with self.lock:
                ballast.unlink()
                self._full.remove(name)


class FaultyEpisode:
    """An episode whose machinery may break. `hits` names the faults that may have hit it; some strike too late."""

    def __init__(self, faults: FaultyEnvironments, task_id: RowTask, attempt: int) -> None:
        self.task_id, self.steps = task_id, 0
        self.hits: list[str] = []
        self.reset: ResetResult
        self._faults = faults
        self._plan = faults.draw(task_id, attempt)
        self._processes: dict[str, tuple[int, int]] = {}  # kind -> process id and a descriptor of that process
        self._channel: socket.socket | None = None

    def open(self) -> None:
        """Open the real episode."""
        try:
            with self._striking("open"):
                self._episode = self._faults.environments.open(self.task_id)
        except BaseException:
            self._leave()
            raise
        self.reset = self._episode.reset
        if self._plan is not None and self._plan.kind in ("world's channel cut", "garbage to world"):
            self._channel = self._episode.world.sock.dup()

    def step(self, code: str) -> StepResult:
        """Run a step as the real episode does, and record it where it takes too long."""
        started = time.monotonic()
        try:
            with self._striking("step"):
                return self._episode.step(code)
        finally:
            self.steps += 1
            overtime_s = time.monotonic() - started - self._faults.environments.step_timeout_s
            if overtime_s > OVERTIME_S:
                told = f"row {self.task_id.row}, step {self.steps}: {overtime_s:.1f} s past its deadline, {self._plan}"
                self._faults.late.append(told)

    def score(self) -> Score:
        """Score as the real episode does."""
        with self._striking("score"):
            return self._episode.score()

    def close(self) -> None:
        """Close the real episode."""
        try:
            self._episode.close()
        finally:
            self._leave()

    def started(self, kind: str, pid: int) -> None:
        """Take note of a process that a host has forked for this episode."""
        if kind in self._processes:
            os.close(self._processes.pop(kind)[1])
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            self._processes[kind] = pid, os.pidfd_open(pid)

    def before_evaluation(self) -> None:
        """Damage the saved state, if that is the plan, before its evaluation begins."""
        plan = self._plan
        if plan is not None and plan.kind == "saved state damaged" and not plan.fired:
            plan.fired = True
            self._faults.record(plan.kind, self)
            for path in self._episode.output.glob("tasks/*/dbs/*.jsonl"):
                path.write_text("{broken")

    def _leave(self) -> None:
        self._faults.forget(self)
        for _, descriptor in self._processes.values():
            os.close(descriptor)
        self._processes.clear()
        if self._channel is not None:
            self._channel.close()

    @contextlib.contextmanager
    def _striking(self, place: str) -> Iterator[None]:
        """Have the planned fault strike during the block, if this is its place."""
        plan = self._plan
        due = plan is not None and not plan.fired and plan.place == place and plan.step in (self.steps, None)
        with self._faults.spawning_for(self), contextlib.ExitStack() as stack:
            if due and plan.kind == "disk full":
                plan.fired = True
                stack.enter_context(self._faults.full_disk(self))
            elif due and plan.kind != "saved state damaged":
                over = threading.Event()
                strike = self._faults.pool.submit(self._strike, plan, over)
                stack.callback(strike.result)
                stack.callback(over.set)
            yield

    def _strike(self, plan: Plan, over: threading.Event) -> None:
        """Inject the planned fault after its delay, as soon as its target exists."""
        time.sleep(plan.delay_s)
        while not plan.fired and not over.is_set():
            strike = self._strike_host if "host" in plan.kind else self._strike_process
            plan.fired = strike(plan.kind)
            over.wait(0 if plan.fired else 0.002)

    def _strike_host(self, kind: str) -> bool:
        host = self._faults.keeper(kind).host
        if host is None or host.dead:
            return False
        if "killed" in kind:
            self._faults.record(kind, self, host)
            host.process.kill()
            if kind == "host killed, and the next":
                self._faults.pool.submit(self._faults.strike_next_host, self, host)
            return True
        with host._lock:
            if host.dead:
                return False
            self._faults.record(kind, self, host)
            with contextlib.suppress(OSError):
                if kind == "host's channel cut":
                    host._control.shutdown(socket.SHUT_RDWR)
                else:
                    host._control.send(GARBAGE, socket.MSG_DONTWAIT)
        return True

    def _strike_process(self, kind: str) -> bool:
        role = {"interpreter": "agent", "evaluator": "evaluation"}.get(kind.partition(" ")[0], "world")
        if role not in self._processes:
            return False
        pid, descriptor = self._processes[role]
        if select.select([descriptor], [], [], 0)[0]:
            return False  # it has ended
        if "stopped" in kind and not _dies_with_its_host(pid):
            return False  # a process that is stopped as soon as it is forked would outlive its host
        self._faults.record(kind, self)
        with contextlib.suppress(OSError):
            if kind == "world cannot write":
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            elif kind == "garbage to world":
                self._channel.send(GARBAGE, socket.MSG_DONTWAIT)
            elif kind == "world's channel cut":
                self._channel.send(HALF_A_MESSAGE, socket.MSG_DONTWAIT)
                self._channel.shutdown(socket.SHUT_RDWR)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP if "stopped" in kind else signal.SIGKILL)
        return True


def _dies_with_its_host(pid: int) -> bool:
    """Whether a forked process has asked to die with its host; right after that it closes its host's descriptors."""
    with contextlib.suppress(OSError):
        return "anon_inode:[pidfd]" not in descriptors(pid).values()
    return False
