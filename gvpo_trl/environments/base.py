"""The protocol of an environment. Its calls block; the rollout loop runs each open episode on a thread of its own.

A result object says what the agent did wrong (`StepResult.failure`). An `EnvironmentFault` says that our machinery
broke; the agent never sees it.
"""

from dataclasses import dataclass
from typing import Protocol

from gvpo_trl.failures import FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """The facts about an episode whose world has just been opened."""

    task_id: str
    """The task's name in its environment, e.g. `"50e1ac9_1"`."""
    seconds: float
    """Wall time from the request for the episode until its world was open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one execution of the agent's code."""

    text: str
    """The text that the agent sees, before the rollout cuts it to its token budget."""
    failure: FailureKind | None
    """Why the step failed; `None` when the code executed."""
    completed: bool = False
    """Whether the agent had declared the task complete, or given it up, by the end of this step."""
    ended: bool = False
    """Whether the agent has ended its interpreter, so that the episode cannot take another step."""
    api_calls: tuple[str, ...] = ()
    """The API calls of the step, each as `app.api`, in order."""
    api_errors: tuple[str, ...] = ()
    """The API calls that an app answered with an error status, each as `app.api`, in order."""
    failed_line: int | None = None
    """The line of the code, from 1, on which the statement begins that raised or does not parse; `None` if unknown."""
    seconds: float = 0.0
    """Wall time of the step. The rollout measures it; an environment leaves it at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The results of the task's unit tests on the final state."""

    passed: tuple[str, ...]
    """The requirements, in words, whose tests passed."""
    failed: tuple[str, ...]
    """The requirements, in words, whose tests failed or did not run."""
    seconds: float = 0.0
    """Wall time of the evaluation. The rollout measures it; an environment leaves it at 0."""

    @property
    def reward(self) -> float:
        """The share of tests that passed, in [0, 1]."""
        total = len(self.passed) + len(self.failed)
        return len(self.passed) / total if total else 0.0

    @property
    def success(self) -> bool:
        """Whether every test passed, so that the task counts for the task goal completion (TGC)."""
        return bool(self.passed) and not self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSource:
    """Where an environment's tasks come from. An environment gives it as its attribute `source`, if it knows."""

    name: str
    """The name of the tasks in a sentence, e.g. `"AppWorld"`."""
    slug: str
    """The name of the tasks as an identifier, e.g. `"appworld"`."""
    description: str = ""
    """Sentences about how the tasks were made."""
    is_publishable: bool = False
    """Whether the texts of the tasks may be uploaded. Tasks without a source count as not publishable."""
    is_appworld: bool = False
    """Whether `load_tasks` and `AppWorldEnvironments` read the tasks, so that a model card can show how."""
    versions: tuple[tuple[str, str], ...] = ()
    """(name, version) of the programs in which the tasks are done."""


class Episode(Protocol):
    """One world with one agent in it. Every method may raise an `EnvironmentFault`."""

    reset: ResetResult

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step."""

    def score(self) -> Score:
        """Run the task's unit tests on the final state; no step is possible afterwards."""

    def close(self) -> None:
        """End the episode and everything that it started; idempotent, safe after a fault."""


class Environment(Protocol):
    """Opens the episodes of a whole training run.

    Its attribute `languages`, if it has one, holds the labels of the fenced blocks that are code, such as `("sql",)`.
    Without it, Python's labels are code.
    """

    max_episodes: int
    """How many episodes may be open at once; the rollout loop makes the others wait.

    An environment may also have `is_checked = True`, so that a new trainer does not try an episode of it, and a method
    `prefetch(task_ids)`, which is asked to open episodes in advance.
    """

    def open(self, task_id: str) -> Episode:
        """Open a fresh episode of the task; thread-safe.

        Raises:
            SetupError: the task is unknown.
            EnvironmentFault: the episode cannot be opened.
        """

    def close(self) -> None:
        """End every episode and process; idempotent."""
