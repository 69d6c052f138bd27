"""Leaves rows that cannot move the weights out of a training step, with the same loss and gradients as TRL.

    B  rows of a micro-batch
    T  length of the padded completions
    P  length of the padded prompts

TRL's `_compute_loss` runs forward and backward for every row, even if all of its advantages are 0. This module passes
it a stand-in for the model, `ComputedRows`, which computes only the other rows. That is right only as long as nothing
but advantages gives a row a gradient, so rows are skipped only with a TRL whose loss is known term by term
(`KNOWN_LOSSES`).
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

KNOWN_LOSSES = {"2f2f7e57defad6f0"}
"""Fingerprints of the losses of TRL whose terms `tests/test_trl_contract.py` has checked one by one."""


def fingerprint(functions: Iterable[Callable[..., Any]]) -> str | None:
    """Return a digest of the functions' code, or `None` if a function has no readable source.

    Comments, docstrings and layout do not change the digest.
    """
    digest = hashlib.sha256()
    for function in functions:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """The state of a training step that decides which rows are computed."""

    rows_may_be_skipped: bool
    """Whether a row has a gradient only through its advantages, and its tokens scale no other row's loss."""
    accelerator: Accelerator
    is_deepspeed: bool
    """Whether DeepSpeed runs the backward pass. It counts the micro-batches itself, so none may be left out."""


def rows_may_be_skipped(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a row has a gradient only through its advantages, and its tokens scale no other row's loss.

    Args:
        trainer: a `GVPOTrainer` whose loss is known.
        inputs: the micro-batch.
    """
    return (
        trainer.model.training
        and trainer.args.skip_idle_rows
        and trainer.beta == 0
        and not trainer._entropy_bonus_enabled
        and not trainer.aux_loss_enabled
        and trainer.top_entropy_quantile == 1.0  # the threshold depends on the entropies of all rows
        and trainer.loss_type != "bnpo"
        and inputs.get("pixel_values") is None  # these have a row per image or tile, not per trajectory
    )


class ComputedRows:
    """Stands in for the model in TRL's loss: computes some rows and returns zeros for the others.

    Args:
        model: the model with TRL's fused head.
        rows: (B,) bool, true on the rows to compute, of which there is at least one.
    """

    def __init__(self, model: Any, rows: torch.Tensor):
        self.model = model
        self.rows = rows

    def __call__(self, labels: torch.Tensor, **inputs: Any) -> Any:
        """Return the model's output with log-probabilities and entropies of B rows.

        Args:
            labels: (B, P + T) ids.
            inputs: the model's other inputs; each tensor among them has B rows.
        """
        inputs = {name: x[self.rows] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        output = self.model(labels=labels[self.rows], **inputs)
        output.log_probs = self._all_rows(output.log_probs)
        output.entropy = self._all_rows(output.entropy)
        return output

    def _all_rows(self, values: torch.Tensor) -> torch.Tensor:
        index = self.rows.nonzero().squeeze(1)
        return values.new_zeros(len(self.rows), values.shape[1]).index_copy(0, index, values)


def loss_of_moving_rows(
    compute_loss: Callable[[Any, dict[str, Any]], torch.Tensor],
    model: torch.nn.Module,
    inputs: dict[str, Any],
    step: TrainingStep,
) -> torch.Tensor:
    """Return TRL's loss of a micro-batch, computed without the rows whose advantages are all 0.

    TRL's entropy and clip metrics then cover only the computed rows. Neither forward nor backward runs if no rank has
    a row to compute.

    Args:
        compute_loss: TRL's `_compute_loss`.
        model: the model that the trainer passes to it.
        inputs: the micro-batch.
        step: says whether rows may be skipped, and lets ranks agree on it.
    """
    if not step.rows_may_be_skipped:
        return compute_loss(model, inputs)
    action_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T)
    rows = ((inputs["advantages"] != 0) & (action_mask != 0)).any(dim=1)  # (B,)
    if _no_rank_needs(rows, step):
        return _zero_loss(model, step.accelerator)
    if not rows.any():
        rows[0] = True  # the other ranks' gradients need this rank's backward
    if rows.all():
        return compute_loss(model, inputs)
    inputs = inputs | {"tool_mask": action_mask * rows.unsqueeze(1)}
    if inputs.get("old_per_token_logps") is not None:
        # A skipped row has log-probabilities of 0. Old ones of 0 keep its ratio from overflowing under the mask.
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] * rows.unsqueeze(1)
    return compute_loss(ComputedRows(model, rows), inputs)


def _no_rank_needs(rows: torch.Tensor, step: TrainingStep) -> bool:
    """Whether the micro-batch can be left out on all ranks.

    With several processes the last micro-batch of an optimizer step always runs, because its backward pass averages
    the gradients of the whole step.
    """
    accelerator = step.accelerator
    if step.is_deepspeed or (accelerator.num_processes > 1 and accelerator.sync_gradients):
        return False
    return accelerator.reduce(rows.any().float(), reduction="sum").item() == 0


def _zero_loss(model: torch.nn.Module, accelerator: Accelerator) -> torch.Tensor:
    """Return a loss of 0 whose backward pass does nothing, and give parameters the gradients of 0 that TRL would give.

    Without gradients the optimizer would leave out its momentum and weight decay.
    """
    if accelerator.num_processes == 1:  # several processes always run a backward pass before the optimizer steps
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return torch.zeros((), device=accelerator.device, requires_grad=True)
