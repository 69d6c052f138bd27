"""The limits of a trajectory, and how observations are shown."""

from dataclasses import dataclass

OBSERVATION_TEMPLATE = "Output:\n```\n{observation}\n```"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """The limits of a trajectory. All lengths are in tokens."""

    max_turns: int
    max_turn_length: int
    """Sampled tokens of one turn."""
    max_observation_length: int
    """Tokens of one observation's text. The middle of a longer text is left out."""
    max_completion_length: int
    """Tokens of everything after the prompt."""
    max_context_length: int | None = None
    """Tokens of prompt and completion together; `None` sets no limit."""
    no_code_is_failure: bool = True
    """Whether a turn without code counts as a failed step."""
    caught_api_errors_fail: bool = False
    """Whether a step counts as failed if its code caught the error of an API call."""
    observation_template: str = OBSERVATION_TEMPLATE
    """The user message that carries an observation, which replaces `{observation}` in it."""
    straggler_s: float = 2.0
    """Seconds that a round waits for its slowest step before it goes on without that step."""
    overlap: bool = False
    """Whether a round begins as soon as half of the live attempts are ready."""
    max_retries: int = 1
    """How often a trajectory starts again after its environment was lost."""

    def room(self, prompt_length: int) -> int:
        """Return how many tokens are left for the completion after a prompt of `prompt_length` tokens."""
        limit = self.max_completion_length
        return limit if self.max_context_length is None else min(limit, self.max_context_length - prompt_length)
