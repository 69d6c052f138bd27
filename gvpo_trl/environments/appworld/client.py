"""AppWorld episodes as the trainer sees them: blocking calls with deadlines that this side keeps.

    trainer ── control ──▶ host       ── fork ──▶ one world per episode    (answers API calls, saves the state)
                                      ── fork ──▶ one process per evaluation   (reads ground truth, after the agent)
            ── control ──▶ agent host ── fork ──▶ one interpreter per episode  (runs the agent's code, restricted)

With `isolation="process"` the world's process runs the agent's code too. AppWorld itself is never imported here: an
open world freezes the clock of its process.
"""

import inspect
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gvpo_trl.environments.appworld.engine.agents import host as agents
from gvpo_trl.environments.appworld.engine.worlds import host as worlds
from gvpo_trl.environments.appworld.episodes import AppWorldEpisode, ProcessEpisode, SplitEpisode
from gvpo_trl.environments.appworld.hosts import Child, HostKeeper, Launch
from gvpo_trl.environments.appworld.limits import check_at_least
from gvpo_trl.environments.appworld.setup import appworld_python
from gvpo_trl.environments.appworld.tasks import check_root, check_task
from gvpo_trl.environments.appworld.workspace import Workspace
from gvpo_trl.environments.base import ResetResult
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, HostFault, SetupError

ISOLATION = ("split", "process")
_EPISODES = {"split": SplitEpisode, "process": ProcessEpisode}
EVALUATORS = 8
"""Processes that wait for the next evaluation at most."""
FETCHERS = 2
"""Threads that prefetch at a time."""
_log = logging.getLogger(__name__)


class AppWorldEnvironments:
    """Many AppWorld episodes at a time, each in a process of its own.

    Nothing starts before the first `open`, which takes some seconds; call `start` to have that behind you. `open` may
    be called from many threads; it waits while `max_episodes` are open.

    Args:
        root: AppWorld's data root, the folder that holds `data/`; the variable `APPWORLD_ROOT` or the current
            folder by default.
        urls: addresses of AppWorld's own environment servers, on this machine or others, to use in the place of
            processes of our own: what you get then is a `RemoteEnvironments`, which has fewer options and protects
            less; see `gvpo_trl.environments.appworld.http.environments`.
        max_episodes: how many episodes may be open at once.
        step_timeout_s: deadline of a step. At the deadline the code is interrupted as AppWorld does it, and the
            episode goes on; code that does not let itself be interrupted is killed a second later, which ends the
            episode. It is then scored on the state after its last finished step.
        open_timeout_s: deadline for opening a world.
        evaluate_timeout_s: deadline of a task's unit tests.
        isolation: `"split"` runs the agent's code in a restricted interpreter that holds no world, no data and no
            ground truth (see docs/sandbox.md); `"process"` runs it in the process that holds the world, for
            comparison and for machines that cannot do better.
        require_sandbox: refuse to run agent code where the kernel cannot restrict the interpreter in full; else that
            is a warning in the log.
        max_interactions: executions that AppWorld allows in an episode.
        max_output_chars: a step that prints more has failed (`FailureKind.OUTPUT`) and its text is cut.
        memory_mb: address space of the process that runs the agent's code; `None` for no limit.
        venv: AppWorld's virtual environment; see `gvpo-trl appworld setup`.
        output_dir: where episodes save their state until they are closed; the temporary folder by default.
        max_restarts: how often in a row a host may die before `open` gives up with `EnvironmentsExhausted`.
        fast: make ready in the host what every world does alike. Off, worlds open as AppWorld opens them, which takes
            three times as long and gives the same texts, test results and saved files.
        rehearse: make calls of every kind once before the first episode. That takes some three seconds and saves
            thirty milliseconds an episode; switch it off for a handful of episodes.

    Raises:
        SetupError: a value, the data root or AppWorld's environment has to be mended.
    """

    def __new__(cls, root: Path | str | None = None, *, urls: Sequence[str] | None = None, **options: Any):
        """With `urls`, a `RemoteEnvironments`, whose options are fewer."""
        if urls is None:
            return super().__new__(cls)
        from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments

        known = set(inspect.signature(RemoteEnvironments.__init__).parameters)
        if wrong := sorted(set(options) - known):
            raise SetupError(
                f"{', '.join(wrong)}: of no effect on the servers of urls=…, whose episodes run where they were "
                "started; leave it out. As many episodes can be open as there are servers"
            )
        return RemoteEnvironments(urls, root=root, **options)

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        urls: None = None,
        max_episodes: int = 16,
        step_timeout_s: float = 30.0,
        open_timeout_s: float = 60.0,
        evaluate_timeout_s: float = 60.0,
        isolation: str = "split",
        require_sandbox: bool = False,
        max_interactions: int = 1000,
        max_output_chars: int = 1_000_000,
        memory_mb: int | None = 4096,
        venv: Path | str | None = None,
        output_dir: Path | str | None = None,
        max_restarts: int = 3,
        fast: bool = True,
        rehearse: bool = True,
    ) -> None:
        check_at_least(1, max_episodes=max_episodes, step_timeout_s=step_timeout_s, max_interactions=max_interactions)
        check_at_least(1, max_output_chars=max_output_chars, open_timeout_s=open_timeout_s)
        check_at_least(1, evaluate_timeout_s=evaluate_timeout_s)
        check_at_least(0, max_restarts=max_restarts)
        self.root = check_root(root)
        self.max_episodes = max_episodes
        self.step_timeout_s = step_timeout_s
        self.open_timeout_s = open_timeout_s
        self.evaluate_timeout_s = evaluate_timeout_s
        if isolation not in ISOLATION:
            raise SetupError(f"isolation={isolation!r} must be one of {', '.join(map(repr, ISOLATION))}")
        if require_sandbox and isolation != "split":
            raise SetupError(f"require_sandbox=True needs isolation='split', not {isolation!r}, which has no sandbox")
        self.isolation, self.require_sandbox = isolation, require_sandbox
        self.max_output_chars = max_output_chars
        python = appworld_python(venv)
        self._workspace = Workspace(output_dir)
        config = {
            "warm_up_task": min(path.name for path in (self.root / "data" / "tasks").iterdir() if path.is_dir()),
            "max_interactions": max_interactions,
            "soft_timeout_s": int(step_timeout_s),
            "max_output_chars": max_output_chars,
            "isolation": isolation,
            "fast": fast,
            "rehearse": rehearse,
            "memory_bytes": memory_mb * 1024 * 1024 if memory_mb else 0,
        }
        config["canaries"] = [str(self._workspace.planted / "evaluation.py")]

        def keeper(name: str, module: str, **options: object) -> HostKeeper:
            launch = Launch(
                name=name,
                python=python,
                module=module,
                root=self.root,
                workspace=self._workspace,
                config=config,
                fault=HostFault,
                **options,
            )
            return HostKeeper(launch, max_restarts)

        self._hosts = keeper("host", worlds.__name__)
        self._agents = keeper("agent-host", agents.__name__, bare=True)
        self._keepers = [self._hosts, self._agents] if isolation == "split" else [self._hosts]
        self._told = False
        self._numbers = itertools.count(1)
        self._slots = threading.Condition()
        self._live = 0
        self._waiting = 0
        self._wanted: Counter[str] = Counter()
        self._prefetched: list[AppWorldEpisode] = []
        self._fetchers = 0
        self._closed = False
        self._idle_evaluators: list[Child] = []
        self._finalizer = weakref.finalize(self, _shut_down, os.getpid(), self._keepers, self._workspace)

    def start(self) -> "AppWorldEnvironments":
        """Start the hosts and wait until they are warm; `open` does it otherwise.

        Raises:
            SetupError: the kernel cannot restrict the interpreter in full and `require_sandbox` is set.
            HostFault, EnvironmentsExhausted: a host did not come up.
        """
        for keeper in self._keepers:
            keeper.begin()
        for keeper in self._keepers:
            facts = keeper.get().wait_ready()
            if keeper is self._agents:
                self._tell(facts)
        if self.isolation == "process" and not self._told:
            self._told = True
            _log.warning(self.protection)
        return self

    @property
    def protection(self) -> str:
        """What keeps agent code from the answers, in words for a log; known after `start`."""
        if self.isolation == "process":
            return 'isolation="process": agent code runs beside the world and can read the answers'
        return f"agent code runs in a sandbox (level: {self.sandbox})"

    def _tell(self, facts: dict) -> None:
        """Say once what restricts the interpreters."""
        self.sandbox = str(facts["level"])
        if self._told:
            return
        missing = "; ".join(facts["missing"])
        if self.sandbox == "full":
            _log.info(self.protection)
        elif self.require_sandbox:
            raise SetupError(f"require_sandbox=True, but the sandbox's level here is {self.sandbox!r}: {missing}")
        else:
            _log.warning(
                "AGENT CODE IS NOT FULLY SANDBOXED (level: %s): a policy may learn to read the answers. %s. "
                "require_sandbox=True refuses to run so; see docs/sandbox.md",
                self.sandbox,
                missing,
            )
        self._told = True

    def _check_restriction(self, ready: dict) -> None:
        """Whether the interpreter's test of itself allows it to run agent code."""
        if ready["leaks"] and (self.require_sandbox or self.sandbox == "full"):
            raise EpisodeFault(f"the interpreter is not restricted as it should be: {'; '.join(ready['leaks'])}")

    def _take_evaluator(self) -> Child:
        """A process that evaluates, for one evaluation: one that has waited for work, or a new one."""
        while True:
            try:
                child = self._idle_evaluators.pop()
            except IndexError:
                return Child(self._hosts, {"kind": "evaluation"})
            if not child.host.dead:
                return child
            child.end(quiet=True)

    def _return_evaluator(self, child: Child, *, again: bool) -> None:
        """Keep a process that can evaluate again; an evaluation in a new one takes three times as long."""
        child.kept = True
        if again and len(self._idle_evaluators) < EVALUATORS:
            self._idle_evaluators.append(child)
        else:
            child.end(quiet=True)

    def _report_success(self) -> None:
        for keeper in self._keepers:
            keeper.report_success()

    def open(self, task_id: str) -> AppWorldEpisode:
        """Open a fresh episode of the task; thread-safe, waits for a free place.

        Raises:
            SetupError: the task is unknown.
            HostFault: the host is gone; the next call starts another one.
            EpisodeFault: the world could not be opened.
            EnvironmentsExhausted: hosts died too often in a row.
        """
        check_task(self.root, task_id)
        started = time.monotonic()
        episode = self._take_place(task_id)
        if episode is None:
            episode = self._make(task_id)
        episode.reset = ResetResult(task_id=task_id, seconds=time.monotonic() - started)
        return episode

    def _take_place(self, task_id: str) -> AppWorldEpisode | None:
        """Wait for a place; the prefetched episode that has it, or `None` for a free one."""
        with self._slots:
            self._waiting += 1
            try:
                while not self._closed:
                    for episode in self._prefetched:
                        if episode.task_id == task_id and not episode.lost:
                            self._prefetched.remove(episode)
                            return episode
                    if self._live < self.max_episodes:
                        self._live += 1
                        return None
                    if self._prefetched:
                        # What nobody asked for makes room, the last first: the next to be asked for come first.
                        unwanted = self._prefetched.pop()
                        self._slots.release()
                        try:
                            unwanted.close()
                        finally:
                            self._slots.acquire()
                        continue
                    self._slots.wait()
                raise HostFault("the environment is closed")
            finally:
                self._waiting -= 1

    def _make(self, task_id: str) -> AppWorldEpisode:
        try:
            self.start()
            return _EPISODES[self.isolation](self, task_id, f"episode-{next(self._numbers):06d}")
        except BaseException:
            self._release()
            raise

    def prefetch(self, task_ids: Sequence[str]) -> None:
        """Open these tasks' episodes in the background, while there is room, for `open` to hand out.

        A later call replaces what an earlier one asked for. What could not be opened is opened by `open`.

        Raises:
            SetupError: a task is unknown.
        """
        for task_id in set(task_ids):
            check_task(self.root, task_id)
        wanted = Counter(task_ids)
        with self._slots:
            kept, dropped = [], []
            for episode in self._prefetched:
                keep = wanted[episode.task_id] > 0 and not episode.lost
                wanted[episode.task_id] -= keep
                (kept if keep else dropped).append(episode)
            self._prefetched, self._wanted = kept, +wanted
            starting = 0 if self._closed else min(FETCHERS, wanted.total()) - self._fetchers
            self._fetchers += max(0, starting)
        for episode in dropped:
            episode.close()
        for _ in range(starting):
            threading.Thread(target=self._fetch, name="prefetch", daemon=True).start()

    def _fetch(self) -> None:
        """Open what is wanted, one after the other, until nothing is or no place is free."""
        while True:
            with self._slots:
                self._wanted = +self._wanted
                full = self._live >= self.max_episodes or self._waiting
                if self._closed or full or not self._wanted:
                    self._fetchers -= 1
                    return
                task_id = next(iter(self._wanted))
                self._wanted[task_id] -= 1
                self._live += 1
            try:
                episode = self._make(task_id)
            except (EnvironmentFault, SetupError) as error:
                _log.debug("task %s could not be prefetched: %s", task_id, error)
                with self._slots:
                    self._wanted.clear()
                continue
            with self._slots:
                keep = not self._closed
                if keep:
                    self._prefetched.append(episode)
                self._slots.notify_all()
            if not keep:
                episode.close()

    def _release(self) -> None:
        with self._slots:
            self._live -= 1
            self._slots.notify_all()
            starting = 0 if self._closed else min(FETCHERS, self._wanted.total()) - self._fetchers
            self._fetchers += max(0, starting)
        for _ in range(starting):
            threading.Thread(target=self._fetch, name="prefetch", daemon=True).start()

    def close(self) -> None:
        """End every episode and process and delete what they saved; idempotent."""
        with self._slots:
            self._closed = True
            prefetched, self._prefetched = self._prefetched, []
            self._slots.notify_all()
        for episode in prefetched:
            episode.close()
        while self._idle_evaluators:
            self._idle_evaluators.pop().end(quiet=True)
        self._finalizer()

    def __enter__(self) -> "AppWorldEnvironments":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _shut_down(owner: int, keepers: list[HostKeeper], workspace: Workspace) -> None:
    # A fork of the trainer (a data loader's worker) runs this at its exit too, and must not end what is not its own.
    if os.getpid() == owner:
        for keeper in keepers:
            keeper.close()
        workspace.remove()
