"""The training step computes what can move the weights, and nothing else; loss and gradients stay TRL's.

    B       rows of a micro-batch
    P, T    length of the padded prompts, of the padded completions
    action  (B, T) 1 on sampled tokens, 0 on observations, bridges and padding

TRL's `_compute_loss` asks the model for log-probabilities of every completion token, observations included, and of
every row, also where each advantage is 0. Here it is given a stand-in for the model that hides both. Another one hides
the observations where TRL scores old and reference log-probabilities.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class ActionsOnly:
    """A model as TRL's loss calls it: labels in, log-probabilities and entropies of them out.

    Labels outside the action mask become -100. TRL's chunked head projects no such position where it runs its Triton
    kernels; elsewhere it scores them all and puts zeros over them.

    Args:
        model: with TRL's fused head.
        action_mask: (B, T)
        rows: (B,) bool, the rows to compute; the others come out as zeros. At least one.
    """

    def __init__(self, model: Any, action_mask: torch.Tensor, rows: torch.Tensor):
        self.model = model
        self.action_mask = action_mask
        self.rows = rows

    def __call__(self, labels: torch.Tensor, **inputs: Any) -> Any:
        """Labels (B, P + T); tensors among the inputs have B rows."""
        labels = _only(self.action_mask, labels)
        if self.rows.all():
            return self.model(labels=labels, **inputs)
        inputs = {name: x[self.rows] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        output = self.model(labels=labels[self.rows], **inputs)
        output.log_probs = self._all_rows(output.log_probs)
        output.entropy = self._all_rows(output.entropy)
        return output

    def _all_rows(self, values: torch.Tensor) -> torch.Tensor:
        index = self.rows.nonzero().squeeze(1)
        return values.new_zeros(len(self.rows), values.shape[1]).index_copy(0, index, values)


class ScoresActions:
    """A model as TRL scores old and reference log-probabilities, some rows at a time; those of actions alone.

    Args:
        model: with TRL's fused head.
        env_masks: by row, 1 on each sampled token of the completion.
        length: T.
    """

    def __init__(self, model: Any, env_masks: Sequence[Sequence[int]], length: int):
        self.model = model
        self.action_mask = torch.tensor([[*mask, *[0] * (length - len(mask))] for mask in env_masks])
        self._scored = 0

    def __call__(self, labels: torch.Tensor, **inputs: Any) -> Any:
        """Labels (rows, P + T) of the next rows."""
        action_mask = self.action_mask[self._scored :][: len(labels)].to(labels.device)
        self._scored += len(labels)
        return self.model(labels=_only(action_mask, labels), **inputs)


def _only(action_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels (B, P + T) with -100 outside the action mask (B, T)."""
    hidden = action_mask.new_ones(labels.shape, dtype=torch.bool)
    hidden[:, -action_mask.shape[1] :] = action_mask == 0
    return labels.masked_fill(hidden, -100)


def loss_of_actions(
    trainer: Any, compute_loss: Callable[[Any, dict[str, Any]], torch.Tensor], model: Any, inputs: dict[str, Any]
) -> torch.Tensor:
    """The loss of a micro-batch, without the work that can move nothing.

    Rows whose advantages are all 0 are left out. Entropy and clip metrics are then those of the rows that are
    computed. Where no row of any rank is left, neither forward nor backward runs.

    Args:
        trainer: a `GVPOTrainer`.
        compute_loss: TRL's `_compute_loss`.
        model: what the trainer hands to it.
        inputs: the micro-batch.
    """
    action_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    rows = torch.ones(len(action_mask), dtype=torch.bool, device=action_mask.device)
    if _rows_may_be_skipped(trainer, inputs):
        rows = ((inputs["advantages"] != 0) & (action_mask != 0)).any(dim=1)
        if _no_rank_needs(trainer, rows):
            return _nothing(trainer, model)
        if not rows.any():
            rows[0] = True  # the other ranks' gradients need this rank's backward
    action_mask = action_mask * rows.unsqueeze(1)
    inputs = inputs | {"tool_mask": action_mask}
    if inputs.get("old_per_token_logps") is not None:
        # A hidden token's new log-probability is 0; its ratio must not overflow before the mask is applied.
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] * action_mask
    return compute_loss(ActionsOnly(model, action_mask, rows), inputs)


def _rows_may_be_skipped(trainer: Any, inputs: dict[str, Any]) -> bool:
    """Whether advantages are all that gives a row a gradient, and no other row's loss is divided by its tokens."""
    return (
        trainer.model.training
        and trainer.args.skip_idle_rows
        and trainer.beta == 0
        and not trainer._entropy_bonus_enabled
        and not trainer.aux_loss_enabled
        and trainer.top_entropy_quantile == 1.0  # its threshold is taken over the entropies of all rows
        and trainer.loss_type != "bnpo"
        and inputs.get("pixel_values") is None  # has a row an image or tile, not a row a sequence
    )


def _no_rank_needs(trainer: Any, rows: torch.Tensor) -> bool:
    """Whether the micro-batch can be left out on all ranks.

    With several processes the last one of an optimizer step always runs: its backward averages what the others left.
    """
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled or (accelerator.num_processes > 1 and accelerator.sync_gradients):
        return False
    return accelerator.reduce(rows.any().float(), reduction="sum").item() == 0


def _nothing(trainer: Any, model: torch.nn.Module) -> torch.Tensor:
    """A loss of 0 whose backward does nothing, with the gradients of 0 that the optimizer would have seen."""
    if trainer.accelerator.num_processes == 1:  # momentum and weight decay go on as ever
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
