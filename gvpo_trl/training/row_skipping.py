"""Leaves out of a training step the rows that cannot move the weights; loss and gradients stay TRL's.

    B  rows of a micro-batch
    T  length of the padded completions
    P  length of the padded prompts

TRL's `_compute_loss` runs forward and backward for every row, also for one whose advantages are all 0. Here it is
given a stand-in for the model that computes the other rows alone. This is right only as long as nothing but advantages
gives a row a gradient, so it is done only with a TRL whose loss is known term by term (`KNOWN_LOSSES`).
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

KNOWN_LOSSES = {"2f2f7e57defad6f0"}
"""Fingerprints of TRL's losses, of which `tests/test_trl_contract.py` knows every term that moves a row."""


def fingerprint(functions: Iterable[Callable[..., Any]]) -> str | None:
    """A digest of the functions' code, which comments, docstrings and layout don't change; `None` without a source."""
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
    """What is known of a training step before its loss is computed."""

    rows_may_be_skipped: bool
    """Whether advantages are all that gives a row a gradient, and no other row's loss is divided by its tokens."""
    accelerator: Accelerator
    is_deepspeed: bool
    """Whether DeepSpeed runs backward, which counts the micro-batches itself."""


class ComputedRows:
    """A model as TRL's loss calls it, which computes some rows and gives zeros for the others.

    Args:
        model: with TRL's fused head.
        rows: (B,) bool, the rows to compute; at least one.
    """

    def __init__(self, model: Any, rows: torch.Tensor):
        self.model = model
        self.rows = rows

    def __call__(self, labels: torch.Tensor, **inputs: Any) -> Any:
        """Labels (B, P + T) in, log-probabilities and entropies of B rows out; each tensor among inputs has B rows."""
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
    """TRL's loss of a micro-batch, computed without the rows whose advantages are all 0.

    TRL's entropy and clip metrics are then those of the rows that are computed. Where no row of any rank is left,
    neither forward nor backward runs.

    Args:
        compute_loss: TRL's `_compute_loss`.
        model: what the trainer hands to it.
        inputs: the micro-batch.
        step: whether rows may be skipped, and how ranks agree on it.
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
        # A skipped row's new log-probability is 0; its ratio must not overflow before the mask is applied.
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] * rows.unsqueeze(1)
    return compute_loss(ComputedRows(model, rows), inputs)


def _no_rank_needs(rows: torch.Tensor, step: TrainingStep) -> bool:
    """Whether the micro-batch can be left out on all ranks.

    With several processes the last one of an optimizer step always runs: its backward averages the gradients that the
    other micro-batches left.
    """
    accelerator = step.accelerator
    if step.is_deepspeed or (accelerator.num_processes > 1 and accelerator.sync_gradients):
        return False
    return accelerator.reduce(rows.any().float(), reduction="sum").item() == 0


def _zero_loss(model: torch.nn.Module, accelerator: Accelerator) -> torch.Tensor:
    """A loss of 0 whose backward does nothing, with the gradients of 0 that the optimizer would have seen."""
    if accelerator.num_processes == 1:  # momentum and weight decay go on as they would
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return torch.zeros((), device=accelerator.device, requires_grad=True)
