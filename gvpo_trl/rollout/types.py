"""The data of a rollout, and the protocols of what samples its turns.

A `Trajectory` holds exactly the ids that the model saw: `prompt_ids`, then for each turn the ids that the model
sampled, and the ids of what the chat template and the environment put after them. These ids are never decoded and
encoded again.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from gvpo_trl.environments.base import Score, StepResult
from gvpo_trl.failures import FailureKind


class StopReason(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    """The agent declared the task complete."""
    MAX_TURNS = "max_turns"
    """The last allowed turn was taken."""
    MAX_TOKENS = "max_tokens"
    """The token budget has no room for the last observation and one more sampled token."""
    AGENT_EXITED = "agent_exited"
    """The agent's code ended its own interpreter."""
    ENVIRONMENT_LOST = "environment_lost"
    """Our machinery broke, and it broke again when the attempt was repeated. The trajectory is unscorable."""

    @property
    def is_truncated(self) -> bool:
        """Whether a budget, and not the agent, ended the trajectory."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The turn that a generator returns for one request."""

    ids: list[int]
    """(t,) the sampled ids, with the end-of-turn token if it was sampled."""
    logprobs: list[float] | None = None
    """(t,) log-probability of each id under the sampling distribution; `None` if the backend does not report them."""
    text: str | None = None
    """The decoded ids without special tokens; `None` if the backend did not decode them."""


class Generate(Protocol):
    """Samples one turn for each request of a batch."""

    def __call__(self, requests: Sequence["TurnRequest"]) -> list[Turn]:
        """Return one turn per request, in order. Each has 1 to `max_new_tokens` ids."""


@runtime_checkable
class StreamingGenerate(Protocol):
    """Samples turns one by one, so that no request waits for another."""

    def submit(self, request: "TurnRequest") -> Future[Turn]:
        """Start a request; a trajectory has at most one at a time. A failed request is a `GenerationFault`."""

    def advance(self) -> bool:
        """Do a small part of the sampling in this thread. `False` means that the caller may wait for the futures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A request for the next turn of a trajectory."""

    trajectory: int
    """The trajectory's row in the batch: the key of a cache that is kept between turns."""
    ids: list[int]
    """(n,) the ids so far: the prompt, and each turn with the bridge behind it."""
    max_new_tokens: int
    """The token budget of this turn, at least 1."""
    seed: int | None = None
    """The seed that the turn is sampled with; `None` leaves it to the generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One assistant turn and the execution of its code."""

    action_ids: list[int] = field(repr=False)
    """(t,) the sampled ids of the turn."""
    action_logprobs: list[float] | None = field(repr=False)
    """(t,) the log-probabilities of `action_ids` when they were sampled, or `None`."""
    bridge_ids: list[int] = field(repr=False)
    """(u,) the template's tokens and the observation between this turn and the next; empty for the last step."""
    text: str
    """The assistant's message."""
    code: str | None
    """The code that was run; `None` when the turn held no code."""
    code_spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of `action_ids` that hold the code, for `failure_span="code"`."""
    statement_spans: tuple[tuple[int, int], ...] = ()
    """The part of `code_spans` from the statement that raised on; empty if no statement of the code raised."""
    observation: str
    """The user message that the agent was shown after the turn."""
    failure: FailureKind | None
    """Why the step failed; `None` when it executed."""
    api_calls: tuple[str, ...] = ()
    """`app.api` of each call that the step made, in order."""
    api_errors: tuple[str, ...] = ()
    """`app.api` of each call that was answered with an error status, in order."""
    generate_s: float = 0.0
    """Seconds from the request of the turn to its last token."""
    execute_s: float = 0.0
    """Seconds that the code ran."""

    @property
    def caught_api_errors(self) -> tuple[str, ...]:
        """The calls that were answered with an error status although no exception left the code."""
        return self.api_errors if self.failure in (None, FailureKind.CAUGHT_API) else ()

    @property
    def looked_at_docs(self) -> bool:
        """Whether the step called the `api_docs` app."""
        return any(call.startswith("api_docs.") for call in self.api_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt at one task, from the prompt to the score."""

    task_id: str
    messages: list[dict[str, Any]] = field(repr=False)
    """The prompt's messages."""
    prompt_ids: list[int] = field(repr=False)
    """(p,)"""
    steps: list[Step] = field(repr=False)
    stop: StopReason
    score: Score | None
    """The unit tests' results; `None` where there are none."""
    given_reward: float | None = None
    """The weighted sum of the reward functions, for a trajectory of TRL's tool loop, which has no unit tests."""
    reset_s: float = 0.0
    """Seconds that the world took to open."""
    score_s: float = 0.0
    """Seconds that the unit tests took."""
    retries: int = 0
    """How often the trajectory started again after a fault."""
    fault: str | None = None
    """Boundary and message of the last fault of our machinery."""

    @property
    def reward(self) -> float | None:
        """The share of passed tests, or the given reward; `None` for an unscorable trajectory."""
        return self.given_reward if self.score is None else self.score.reward

    @property
    def completion_messages(self) -> list[dict[str, str]]:
        """The conversation after the prompt, with one message per turn and without the last observation."""
        messages = []
        for step in self.steps:
            messages.append({"role": "assistant", "content": step.text})
            if step is not self.steps[-1]:
                messages.append({"role": "user", "content": step.observation})
        return messages


__all__ = [
    "Generate",
    "Score",
    "Step",
    "StepResult",
    "StopReason",
    "StreamingGenerate",
    "Trajectory",
    "Turn",
    "TurnRequest",
]
