"""Keeps the number of forwards equal on all ranks, because each forward gathers the sharded parameters.

Within a call of `generate`, transformers takes care of this (`synced_gpus`). The number of calls differs, because each
rank has its own trajectories, which end at different turns. Before each call the ranks therefore tell each other what
they are about to do. A rank that has no turns left to sample takes part in the others' calls until no rank has any.
"""

import torch
from torch import distributed
from transformers.distributed.fsdp import is_fsdp_managed_module


def needs_equal_forwards(model: torch.nn.Module, *, is_sharded: bool, processes: int) -> bool:
    """Whether a forward of the model is a collective call of several processes.

    Args:
        model: the model, which transformers itself may have sharded by FSDP (`from_pretrained(distributed_config=…)`).
        is_sharded: whether Accelerate has sharded the model, by FSDP or ZeRO-3.
        processes: number of processes.
    """
    return processes > 1 and (is_sharded or is_fsdp_managed_module(model))


class Ranks:
    """Exchanges flags between the ranks of a rollout.

    Args:
        device: the model's device, on which the flags are reduced.
        together: whether the ranks must run equal numbers of forwards; otherwise this rank exchanges nothing.
    """

    def __init__(self, device: torch.device, together: bool):
        self.device = device
        self.together = together

    def any(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank. This is a collective call."""
        if not self.together:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.float32, device=self.device)
        distributed.all_reduce(values)
        return [value > 0 for value in values.tolist()]
