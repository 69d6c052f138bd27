"""What the rollout loop asks of an environment. Blocking calls; the loop runs each live episode on its own thread.

A result object says what the agent did wrong (`StepResult.failure`); an exception of `environments.errors` says that
our machinery broke, and the agent never sees it.
"""

from dataclasses import dataclass
from typing import Protocol

from gvpo_trl.failures import FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """What is known of an episode once its world is open."""

    task_id: str
    """The environment's name of the task, e.g. `"50e1ac9_1"`."""
    seconds: float
    """Wall time from asking for the episode to its world being open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one execution of the agent's code gave."""

    text: str
    """What the agent sees, not yet cut to its token budget."""
    failure: FailureKind | None
    """Why the step failed; `None` when it executed."""
    completed: bool = False
    """Whether the task was declared complete (also as failed) by the end of this step."""
    ended: bool = False
    """Whether the episode cannot take another step: its interpreter is gone by the agent's own doing."""
    api_calls: tuple[str, ...] = ()
    """`app.api` of each call that the step made, in order."""
    api_errors: tuple[str, ...] = ()
    """`app.api` of each call that answered with an error status, in order."""
    seconds: float = 0.0
    """Wall time of the step as the trainer's process saw it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What the task's unit tests said of the final state."""

    passed: tuple[str, ...]
    """Requirement texts of the tests that passed."""
    failed: tuple[str, ...]
    """Requirement texts of the tests that failed."""
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        """The share of tests that passed, in [0, 1]."""
        total = len(self.passed) + len(self.failed)
        return len(self.passed) / total if total else 0.0

    @property
    def success(self) -> bool:
        """Whether every test passed (the task counts for TGC)."""
        return bool(self.passed) and not self.failed


class Episode(Protocol):
    """One world with one agent in it. Every method may raise an `EnvironmentFault`."""

    reset: ResetResult

    def step(self, code: str) -> StepResult:
        """Run the code in the episode's interpreter; state carries over to the next step."""

    def score(self) -> Score:
        """Run the task's unit tests on the final state, after which no step is possible."""

    def close(self) -> None:
        """End the episode and leave nothing behind; idempotent, safe after a fault."""


class Environment(Protocol):
    """Opens episodes. One environment serves a whole training run."""

    max_episodes: int
    """How many episodes may be open at once; the loop queues the rest."""

    def open(self, task_id: str) -> Episode:
        """Open a fresh episode of the task; thread-safe.

        Raises:
            SetupError: the task is unknown.
            EnvironmentFault: the episode could not be opened.
        """

    def close(self) -> None:
        """End every episode and process; idempotent."""
