"""The seam between the rollout and the trainer: all that a rollout gets from the trainer that asks for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSeconds:
    """Where the time of a rollout went, in seconds of wall time. The spans overlap, so they don't add up."""

    generate: float
    """The model sampled turns."""
    environment: float
    """The rest: worlds opened, code ran, tests were evaluated, and no turn was sampled."""
    overlap: float
    """Turns were sampled and at least one environment worked."""
    reset_wait: float
    """The code of at least one turn waited for its world to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """What the trainer hands to a rollout, made anew for each call of it. All lengths are in tokens."""

    rows: Sequence[Mapping[str, Any]]
    """(B,) the data set's rows of this call, in the order of the prompts: `task_id`, and `datetime` where known."""
    is_training: bool
    """Whether the trajectories are sampled to train on them, and not to evaluate."""
    tokenizer: Any
    """A transformers tokenizer."""
    end_ids: Sequence[int]
    """Ids that end a turn, as TRL knows them."""
    chat_template: str | None
    """A template to use in the place of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any]
    """What every rendering of the template is given."""
    max_turns: int
    """Turns of a trajectory."""
    max_turn_length: int
    """Sampled tokens of one turn."""
    max_observation_length: int
    """Tokens of one observation."""
    max_completion_length: int
    """Tokens of a trajectory after its prompt."""
    max_context_length: int | None
    """Tokens of prompt and trajectory together; `None` for no limit."""
    no_code_is_failure: bool
    """Whether a turn without code is a failed step."""
    failure_span: str
    """Which tokens of a failed step are marked: those of its "turn" or of its "code"."""
    mask_truncated_completions: bool
    """Whether a trajectory that a budget ended leaves the loss."""
    generation_session: Callable[[Sequence[int]], AbstractContextManager[Generate | StreamingGenerate]]
    """Opens what samples the turns of one rollout; takes the ids that end a turn."""
    record: Callable[[list[Trajectory], RolloutSeconds, bool], None]
    """Takes trajectories, seconds, and whether they count in the metrics of the trainer's next log."""


class RolloutTrainer(Protocol):
    """What TRL passes to a `MultiTurnRollout` beside the prompts: the trainer, which makes the context of the call."""

    def rollout_context(self) -> RolloutContext:
        """What the rollout needs now: the rows of the batch in progress, budgets, and what samples."""
