"""The data of a rollout. Frozen, keyword-only; derived values are properties.

A `Trajectory` holds the exact ids that the model saw: `prompt_ids`, then per turn the ids it sampled and the ids that
the chat template and the environment put after them. Nothing here is ever decoded and encoded again.
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
    """The next prompt, or the next turn's shortest answer, would not fit the token budget."""
    AGENT_EXITED = "agent_exited"
    """The agent's code ended its own interpreter."""
    ENVIRONMENT_LOST = "environment_lost"
    """Our machinery broke, also on the retry: the trajectory is unscorable."""

    @property
    def is_truncated(self) -> bool:
        """Whether a budget, and not the agent, ended the trajectory."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a generator returns for one request."""

    ids: list[int]
    """(t,) sampled ids, the end-of-turn token included when it was sampled."""
    logprobs: list[float] | None = None
    """(t,) log-probability of each sampled id under the sampling distribution; `None` when the backend has none."""
    text: str | None = None
    """Decoded ids without special tokens, when the backend has it at hand."""


class Generate(Protocol):
    """Samples one turn for every request. The loop never knows which backend does it."""

    def __call__(self, requests: Sequence["TurnRequest"]) -> list[Turn]:
        """Return one turn per request, in order; at most `max_new_tokens` ids each."""


@runtime_checkable
class StreamingGenerate(Protocol):
    """Samples turns that come and go one by one: no request waits for another. What `Generate` is for batches."""

    def submit(self, request: "TurnRequest") -> Future[Turn]:
        """Take a request, one a trajectory at a time. The future may hold a `GenerationFault` of this request."""

    def advance(self) -> bool:
        """Do a small piece of the sampling in this thread; `False` when the futures may as well be waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """What the loop asks a generator for."""

    trajectory: int
    """Row of the batch: a key for caches kept between turns."""
    ids: list[int]
    """(n,) everything so far: prompt, sampled turns, bridges and observations."""
    max_new_tokens: int
    """Budget of this turn, at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One assistant turn and the execution of its code."""

    action_ids: list[int] = field(repr=False)
    """(t,) the sampled ids of the turn."""
    action_logprobs: list[float] | None = field(repr=False)
    """(t,) their log-probabilities when sampled, or `None`."""
    bridge_ids: list[int] = field(repr=False)
    """(u,) template tokens, observation and next generation prompt after the turn; empty for the last step."""
    text: str
    """The assistant's message."""
    code: str | None
    """What was run; `None` when the turn held no code."""
    code_spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of `action_ids` that hold the code, for `failure_span="code"`."""
    observation: str
    """What the agent was shown, cut to its budget."""
    failure: FailureKind | None
    """Why the step failed; `None` when it executed."""
    api_calls: tuple[str, ...] = ()
    generate_s: float = 0.0
    execute_s: float = 0.0

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
    """`None`: unscorable, because the environment was lost."""
    reset_s: float = 0.0
    score_s: float = 0.0
    retries: int = 0
    fault: str | None = None
    """Boundary and message of the last fault of our machinery, for the log."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The share of passed tests, `None` for an unscorable trajectory."""
        return None if self.score is None else self.score.reward

    @property
    def completion_messages(self) -> list[dict[str, str]]:
        """The conversation after the prompt as it was: one message a turn, the last observation left out."""
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
