"""Rules that turn outcome advantages and verdicts on steps into one advantage per token.

A rule is a function of one `StepAdvantageInputs` that returns (B, T). `GVPOTrainer(step_advantages=rule)` takes any
such function, and `GVPOConfig(shaping="…")` takes the name of one in `RULES`. `docs/step_advantages.md` says where
each of them comes from.

Shapes:
    B  number of rows, one per trajectory; consecutive rows of one task form a group
    T  number of completion tokens after padding
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gvpo_trl.failures import FailureKind
from gvpo_trl.objective import outcome_advantages, shape_advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """One step of a row, as a rule sees it."""

    position: int
    """The step's place in its trajectory, from 0."""
    tokens: tuple[int, int]
    """Half-open range of the row's tokens that the turn's sampled tokens fill."""
    failed: bool
    """The verdict: whether the step failed."""
    kind: FailureKind | None = None
    """Why the step failed; `None` if it executed, or if the rollout only said that it failed."""
    spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of the row's tokens that `failure_span` chooses, also for a step that executed."""
    api_calls: tuple[str, ...] = ()
    """`app.api` of each call of the step, in order."""
    api_errors: tuple[str, ...] = ()
    """`app.api` of each call that was answered with an error, in order."""
    penalty: float = 0.0
    """The `failure_penalty` of the step's kind; 0 for a step that executed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdvantageInputs:
    """Everything that a rule knows of the rows of one process."""

    outcome: torch.Tensor
    """(B,) outcome advantages Â; NaN marks an unscorable row, all of whose advantages must be 0."""
    action_mask: torch.Tensor
    """(B, T) true on sampled tokens. A row that left the loss has none."""
    failed_mask: torch.Tensor
    """(B, T) true on the tokens of failed steps that `failure_span` chooses; a subset of `action_mask`."""
    group_size: int
    """Consecutive rows of one task. The rows of a process need not hold whole groups."""
    steps: tuple[tuple[StepView, ...], ...]
    """The steps of each of the B rows, in order."""
    penalty: float | torch.Tensor = 0.2
    """`failure_penalty`: one number, or (B, T) where the kinds of failures have different ones."""

    def constant(self) -> torch.Tensor:
        """Return (B, T) with Â on every sampled token, and 0 elsewhere and in unscorable rows."""
        return shape_advantages(self.outcome, self.action_mask, self.failed_mask, mode="none")


StepAdvantageRule = Callable[[StepAdvantageInputs], torch.Tensor]
"""Returns (B, T) advantages, which must be finite, and 0 on tokens outside the action mask."""


def apply_rule(rule: StepAdvantageRule, inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return the (B, T) advantages of a rule in the dtype of the outcome advantages.

    Raises:
        ValueError: the rule's result is no tensor of shape (B, T), holds NaN or an infinite value, or has a value on a
            token that is no action. The message names the row.
    """
    name, shape = _name_of(rule), tuple(inputs.action_mask.shape)
    advantages = rule(inputs)
    if not isinstance(advantages, torch.Tensor):
        raise ValueError(f"step_advantages={name} returned a {type(advantages).__name__}; return a tensor {shape}.")
    if tuple(advantages.shape) != shape:
        row = min(len(advantages), shape[0]) if advantages.dim() == 2 and advantages.shape[1] == shape[1] else 0
        raise ValueError(
            f"step_advantages={name} returned shape {tuple(advantages.shape)}, wrong from row {row} on; return "
            f"(B, T) = {shape}, one advantage per token."
        )
    wrong = {
        "NaN or an infinite value": ~advantages.isfinite(),
        "a value on a token that was not sampled (an observation or padding)": (advantages != 0)
        & ~inputs.action_mask.bool(),
    }
    for what, where in wrong.items():
        if where.any():
            row, token = where.nonzero()[0].tolist()
            raise ValueError(
                f"step_advantages={name} returned {what} in row {row}, token {token}: {advantages[row, token].item()}"
                "; return 0 where nothing is to be learnt."
            )
    return advantages.to(inputs.outcome.dtype)


def _name_of(rule: StepAdvantageRule) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


# The paper's method, its ablation, and plain outcome advantages


def gvpo(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return the paper's advantages: the four cases of `shape_advantages`."""
    return shape_advantages(inputs.outcome, inputs.action_mask, inputs.failed_mask, penalty=inputs.penalty)


def additive(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return the advantages of the paper's ablation, in which a failed step of a loser gets Â − b."""
    return shape_advantages(
        inputs.outcome, inputs.action_mask, inputs.failed_mask, penalty=inputs.penalty, mode="additive"
    )


def outcome_only(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return Â on every sampled token, whether its step failed or not."""
    return inputs.constant()


# One branch of GVPO alone


def ties_only(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return −b on failed steps of rows with Â = 0, and Â elsewhere."""
    return _gvpo_where(inputs, inputs.outcome == 0)


def losers_only(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return (1 + b)·Â on failed steps of rows with Â < 0, and Â elsewhere."""
    return _gvpo_where(inputs, inputs.outcome < 0)


def winners_only(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return 0 on failed steps of rows with Â > 0, and Â elsewhere."""
    return _gvpo_where(inputs, inputs.outcome > 0)


def _gvpo_where(inputs: StepAdvantageInputs, rows: torch.Tensor) -> torch.Tensor:
    """Return GVPO's advantages in the given rows (B,), and Â in the others."""
    return torch.where(rows.unsqueeze(1), gvpo(inputs), inputs.constant())


# Controls and methods of others


@dataclass(frozen=True, kw_only=True, slots=True)
class Placebo:
    """GVPO's four cases on as many steps as failed, but drawn among the steps that executed.

    A gain that this rule shows as well does not come from the verdicts. Failed steps count as executed. If fewer steps
    executed than failed, all that executed are marked. The same inputs and the same seed give the same steps.
    """

    seed: int = 0

    def __call__(self, inputs: StepAdvantageInputs) -> torch.Tensor:
        """Return (B, T)."""
        actions = inputs.action_mask.bool()
        steps = [
            (row, step)
            for row, of_row in enumerate(inputs.steps)
            for step in of_row
            if actions[row, slice(*step.tokens)].any()
        ]
        failed = [step for _, step in steps if step.failed]
        executed = [(row, step) for row, step in steps if not step.failed]
        choose = random.Random(f"{self.seed} {[(row, step.tokens, step.failed) for row, step in steps]}")
        marked = choose.sample(executed, min(len(failed), len(executed)))
        mask = torch.zeros_like(inputs.action_mask, dtype=torch.bool)
        penalty = torch.zeros_like(inputs.action_mask, dtype=inputs.outcome.dtype)
        for (row, step), model in zip(marked, failed, strict=False):
            for start, end in step.spans or (step.tokens,):
                mask[row, start:end] = True
                penalty[row, start:end] = model.penalty
        return shape_advantages(inputs.outcome, inputs.action_mask, mask & actions, penalty=penalty)


def failing_share(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return R' − mean(R') on every sampled token, where R' is the reward minus b times the share of failed steps.

    With a penalty per kind, each failed step counts with its own. The penalty is in units of the outcome advantages,
    which are those of the reward with `scale_rewards="none"`.

    Raises:
        ValueError: the rows of this process do not hold whole groups.
    """
    rows, size = inputs.outcome.numel(), inputs.group_size
    if rows % size:
        raise ValueError(
            f"failing_share needs whole groups of {size}, but this process has {rows} rows, so row "
            f"{rows - rows % size} begins a group that is split; set a batch size per device that is a multiple of it."
        )
    costs = [sum(step.penalty for step in steps) / max(1, len(steps)) for steps in inputs.steps]
    cost = inputs.outcome.new_tensor(costs).masked_fill(inputs.outcome.isnan(), torch.nan)
    outcome = inputs.outcome + outcome_advantages(-cost, size)
    return shape_advantages(outcome, inputs.action_mask, inputs.failed_mask, mode="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overwrite:
    """A constant on failed steps, whatever the outcome of their row, and Â elsewhere."""

    value: float | None = None
    """The advantage of failed steps; `None` stands for −b."""

    def __call__(self, inputs: StepAdvantageInputs) -> torch.Tensor:
        """Return (B, T)."""
        constant = inputs.constant()
        value = torch.as_tensor(-inputs.penalty if self.value is None else self.value).to(constant)
        return torch.where(inputs.failed_mask.bool() & ~inputs.outcome.isnan().unsqueeze(1), value, constant)


def mask_failed(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return 0 on failed steps of winners and losers alike, and Â elsewhere."""
    return inputs.constant().masked_fill(inputs.failed_mask.bool(), 0.0)


def mask_rows_without_success(inputs: StepAdvantageInputs) -> torch.Tensor:
    """Return 0 in rows none of whose steps executed, and Â elsewhere."""
    idle = [all(step.failed for step in steps) for steps in inputs.steps]
    return inputs.constant().masked_fill(torch.tensor(idle, device=inputs.outcome.device).unsqueeze(1), 0.0)


RULES: dict[str, Callable[[int], StepAdvantageRule]] = {
    "multiplicative": lambda seed: gvpo,
    "additive": lambda seed: additive,
    "none": lambda seed: outcome_only,
    "ties": lambda seed: ties_only,
    "losers": lambda seed: losers_only,
    "winners": lambda seed: winners_only,
    "placebo": lambda seed: Placebo(seed=seed),
    "failing_share": lambda seed: failing_share,
    "overwrite": lambda seed: Overwrite(),
    "mask_failed": lambda seed: mask_failed,
    "mask_without_success": lambda seed: mask_rows_without_success,
}
"""Maps each value of `shaping` to the maker of its rule, which gets the run's seed."""


def penalty_of(failure_penalty: float | dict[str, float], kind: FailureKind | None) -> float:
    """Return the penalty of a failed step: its kind's, or the default where the kind is unknown or has none."""
    if not isinstance(failure_penalty, dict):
        return failure_penalty
    return failure_penalty.get(kind, failure_penalty["default"])


def penalty_tensor(
    failure_penalty: float | dict[str, float], steps: Sequence[Sequence[StepView]], like: torch.Tensor
) -> float | torch.Tensor:
    """Return the penalty as a rule takes it: the number itself, or (B, T) in the dtype `float32` for a mapping.

    Args:
        failure_penalty: as `GVPOConfig` holds it.
        steps: the steps of each row.
        like: a (B, T) tensor of the wanted shape and device.
    """
    if not isinstance(failure_penalty, dict):
        return failure_penalty
    penalty = torch.zeros_like(like, dtype=torch.float32)
    for row, of_row in enumerate(steps):
        for step in of_row:
            penalty[row, slice(*step.tokens)] = step.penalty
    return penalty
