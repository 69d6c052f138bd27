"""The interface between the rollout and the trainer: everything that a rollout gets from the trainer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gvpo_trl.rollout.streams import Streams
from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSeconds:
    """Seconds of wall time of a rollout. `generate` and `environment` add up to the whole; the others overlap them."""

    generate: float
    """Time in which the model sampled turns."""
    environment: float
    """Time in which no turn was sampled: worlds were opened, code ran, or tests were evaluated."""
    overlap: float
    """Time in which turns were sampled and at least one environment worked."""
    reset_wait: float
    """Time in which the code of at least one turn waited for its world to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """What the trainer passes to a rollout. Each call of the rollout gets a new one. All lengths are in tokens."""

    rows: Sequence[Mapping[str, Any]]
    """(B,) the data set's rows of this call, in the order of the prompts: `task_id`, and `datetime` where known."""
    is_training: bool
    """Whether the trajectories are sampled for training; otherwise they are sampled for an evaluation."""
    tokenizer: Any
    """A transformers tokenizer."""
    end_ids: Sequence[int]
    """TRL's ids that end a turn (`eos_token_ids`)."""
    chat_template: str | None
    """Template that replaces the tokenizer's own; `None` keeps the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any]
    """Variables for every rendering of the template."""
    max_turns: int
    """The most turns of a trajectory."""
    max_turn_length: int
    """The most sampled tokens of one turn."""
    max_observation_length: int
    """The most tokens of one observation."""
    max_completion_length: int
    """The most tokens of a trajectory after its prompt."""
    max_context_length: int | None
    """The most tokens of prompt and trajectory together; `None` sets no limit."""
    no_code_is_failure: bool
    """Whether a turn without code is a failed step."""
    failure_span: str
    """Which tokens of a failed step are marked as failed: those of the whole "turn", of the "code" in it, or of the
    code from the "statement" that raised on."""
    mask_truncated_completions: bool
    """Whether a trajectory that a budget ended is left out of the loss."""
    streams: Callable[[], Streams]
    """Returns the seeds of the next rollout's turns; each call is for another rollout."""
    no_code: str = "penalise"
    """What becomes of a failed turn without code; see `pack`."""
    caught_api_errors_fail: bool = False
    """Whether a step counts as failed if its code caught the error of an API call."""
    generation_session: Callable[[Sequence[int]], AbstractContextManager[Generate | StreamingGenerate]]
    """Opens a generator for one rollout. Its argument is the list of ids that end a turn."""
    record: Callable[[list[Trajectory], RolloutSeconds, bool], None]
    """Records a rollout: its trajectories, its seconds, and whether they count in the trainer's next log."""


OPTIONS = (
    *("max_turns", "max_turn_length", "max_observation_length", "max_completion_length", "no_code_is_failure"),
    *("no_code", "caught_api_errors_fail", "failure_span", "mask_truncated_completions"),
)
"""Fields of `RolloutContext` that a `GVPOConfig` holds under the same names."""


class RolloutTrainer(Protocol):
    """The trainer as a rollout sees it. TRL passes it to a `rollout_func` beside the prompts."""

    def rollout_context(self) -> RolloutContext:
        """Return what the rollout needs for the batch in progress."""
