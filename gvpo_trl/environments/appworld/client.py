"""The AppWorld environment of a training run: it starts the processes behind episodes and hands episodes out.

    trainer ── control ──▶ host       ── fork ──▶ one world per episode        (answers API calls, saves the state)
                                      ── fork ──▶ evaluators, kept for reuse   (read ground truth, after the agent)
            ── control ──▶ agent host ── fork ──▶ one interpreter per episode  (runs the agent's code, restricted)

With `isolation="process"` the world's process runs the agent's code too. AppWorld itself is never imported here: an
open world freezes the clock of its process.
"""

import functools
import inspect
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gvpo_trl.environments.appworld.episodes import AppWorldEpisode, ProcessEpisode, SplitEpisode
from gvpo_trl.environments.appworld.limits import CommonEnvironment, Limits, check_at_least
from gvpo_trl.environments.appworld.machinery import Machinery, make_machinery
from gvpo_trl.environments.appworld.prefetch import Places
from gvpo_trl.environments.appworld.setup import VERSION, appworld_python, check_platform
from gvpo_trl.environments.appworld.tasks import check_root, check_task, task_source
from gvpo_trl.environments.appworld.workspace import Workspace
from gvpo_trl.environments.base import ResetResult
from gvpo_trl.faults import SetupError

ISOLATION = ("split", "process")
MAX_OUTPUT_CHARS = 1_500_000
"""The most that `max_output_chars` may be. Three texts of that length are shorter than `frames.MAX_FRAME_BYTES`."""


class AppWorldEnvironments(CommonEnvironment):
    """Many AppWorld episodes at a time, each in a process of its own.

    The processes start at the first `open`, which takes some seconds, or when `start` is called. Many threads may call
    `open`, which waits while `max_episodes` are open.

    Args:
        root: AppWorld's data root, the folder that holds `data/`; the variable `APPWORLD_ROOT` or the current
            folder by default.
        urls: addresses of AppWorld's own environment servers, on this machine or others, to use in the place of
            processes of our own. The result is then a `RemoteEnvironments`, which has fewer options and protects
            less; see `gvpo_trl.environments.appworld.http.environments`.
        max_episodes: how many episodes may be open at once.
        step_timeout_s: deadline of a step. At the deadline the code is interrupted as AppWorld does it, and the
            episode goes on. Code that ignores the interruption is killed a second later, which ends the episode; it
            is then scored on the state after its last finished step.
        open_timeout_s: deadline for opening a world.
        evaluate_timeout_s: deadline of a task's unit tests.
        isolation: `"split"` runs the agent's code in a restricted interpreter that holds no world, no data and no
            ground truth (see docs/sandbox.md); `"process"` runs it in the process that holds the world, for
            comparison and for machines that cannot do better.
        require_sandbox: refuse to run agent code where the kernel cannot restrict the interpreter in full; by default
            there is a warning in the log.
        max_interactions: executions that AppWorld allows in an episode.
        max_output_chars: a step that prints more has failed (`FailureKind.OUTPUT`) and its text is cut. At most
            1,500,000, because the message about a step holds three texts.
        memory_mb: address space of the process that runs the agent's code; `None` for no limit.
        venv: AppWorld's virtual environment; see `gvpo-trl appworld setup`.
        output_dir: where episodes save their state until they are closed; the temporary folder by default.
        max_restarts: how often in a row a host may die before `open` gives up with `EnvironmentsExhausted`.
        fast: prepare in the host what is the same for every world. With `False` worlds open as AppWorld opens them,
            which takes three times as long and gives the same texts, test results and saved files.
        rehearse: make calls of every kind once before the first episode. That takes some three seconds and saves
            thirty milliseconds an episode; switch it off for a handful of episodes.

    Raises:
        SetupError: a value, the data root or AppWorld's environment is wrong.
    """

    def __new__(cls, root: Path | str | None = None, *, urls: Sequence[str] | None = None, **options: Any):
        """Make a `RemoteEnvironments`, which has fewer options, where `urls` are given."""
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
        super().__init__(
            Limits(
                step_timeout_s=step_timeout_s,
                open_timeout_s=open_timeout_s,
                evaluate_timeout_s=evaluate_timeout_s,
                max_interactions=max_interactions,
                max_output_chars=max_output_chars,
            )
        )
        check_at_least(1, max_episodes=max_episodes)
        check_at_least(0, max_restarts=max_restarts)
        if max_output_chars > MAX_OUTPUT_CHARS:
            raise SetupError(f"max_output_chars={max_output_chars!r} must be at most {MAX_OUTPUT_CHARS}")
        self.root = check_root(root)
        self.source = replace(task_source(self.root), versions=(("appworld", VERSION),))
        self.max_episodes = max_episodes
        if isolation not in ISOLATION:
            raise SetupError(f"isolation={isolation!r} must be one of {', '.join(map(repr, ISOLATION))}")
        if require_sandbox and isolation != "split":
            raise SetupError(f"require_sandbox=True needs isolation='split', not {isolation!r}, which has no sandbox")
        self.isolation, self.require_sandbox = isolation, require_sandbox
        self.machinery = make_machinery(
            self.root,
            appworld_python(venv),
            Workspace(output_dir),
            self.limits,
            isolation=isolation,
            require_sandbox=require_sandbox,
            memory_mb=memory_mb,
            max_restarts=max_restarts,
            fast=fast,
            rehearse=rehearse,
        )
        self._places = Places(max_episodes, functools.partial(_open_episode, self.machinery, itertools.count(1)))
        self._finalizer = weakref.finalize(self, _shut_down, os.getpid(), self.machinery)

    def start(self) -> "AppWorldEnvironments":
        """Start the hosts and wait until they are warm; without this call the first `open` does it.

        Raises:
            SetupError: this is not Linux, or the kernel cannot restrict the interpreter in full and
                `require_sandbox` is set.
            HostFault, EnvironmentsExhausted: a host did not come up.
        """
        check_platform()
        self.machinery.start()
        return self

    @property
    def sandbox(self) -> str | None:
        """How well the interpreters are restricted: `"full"`, `"partial"` or `"none"`; `None` before `start`."""
        return self.machinery.protection.level

    @property
    def protection(self) -> str:
        """What keeps agent code from the answers, in words for a log; known after `start`."""
        return str(self.machinery.protection)

    def open(self, task_id: str) -> AppWorldEpisode:
        """Open a fresh episode of the task; thread-safe, waits for a free place.

        Raises:
            SetupError: the task is unknown, or this is a fork of the process that made the environment.
            HostFault: the host is gone; the next call starts another one.
            EpisodeFault: the world could not be opened.
            EnvironmentsExhausted: hosts died too often in a row.
        """
        check_platform()
        self.check_process()
        check_task(self.root, task_id)
        started = time.monotonic()
        episode = self._places.take(task_id)
        episode.reset = ResetResult(task_id=task_id, seconds=time.monotonic() - started)
        return episode

    def prefetch(self, task_ids: Sequence[str]) -> None:
        """Open these tasks' episodes in the background, while there is room, for `open` to hand out.

        A later call replaces what an earlier one asked for. A task that cannot be opened in advance is left to `open`.

        Raises:
            SetupError: a task is unknown, or this is a fork of the process that made the environment.
        """
        self.check_process()
        for task_id in set(task_ids):
            check_task(self.root, task_id)
        self._places.prefetch(task_ids)

    @property
    def prefetched(self) -> tuple[AppWorldEpisode, ...]:
        """The episodes that `prefetch` has opened and `open` has not handed out yet."""
        return self._places.ready

    def close(self) -> None:
        """End every episode and process and delete what they saved; idempotent."""
        self._places.close()
        self.machinery.evaluators.close()
        self._finalizer()

    def __enter__(self) -> "AppWorldEnvironments":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _open_episode(
    machinery: Machinery, numbers: Iterator[int], task_id: str, on_close: Callable[[], None]
) -> AppWorldEpisode:
    """Open an episode under a name that no other one of the machinery has."""
    machinery.start()
    kind = ProcessEpisode if machinery.agents is None else SplitEpisode
    return kind(machinery, task_id, f"episode-{next(numbers):06d}", on_close)


def _shut_down(owner: int, machinery: Machinery) -> None:
    # A fork of the trainer, such as a data loader's worker, runs this when it exits too. It must not end the owner's
    # processes.
    if os.getpid() == owner:
        machinery.close()
