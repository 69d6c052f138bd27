"""Sharded parameters are gathered by every forward, so all ranks must run the same number of them.

Within a call of `generate`, transformers sees to it (`synced_gpus`). Between the calls the ranks are free here: each
has its own trajectories, which end at different turns. Before each call the ranks tell each other what they are about
to do, and a rank that has nothing left to do takes part in the calls of the others until there are none.
"""

import torch
from torch import distributed
from transformers.distributed.fsdp import is_fsdp_managed_module


def needs_equal_forwards(model: torch.nn.Module, *, is_sharded: bool, processes: int) -> bool:
    """Whether a forward of the model is a collective call of several processes.

    Args:
        model: which transformers itself may have sharded by FSDP (`from_pretrained(distributed_config=…)`).
        is_sharded: whether Accelerate has sharded it, by FSDP or ZeRO-3.
        processes: how many there are.
    """
    return processes > 1 and (is_sharded or is_fsdp_managed_module(model))


class Ranks:
    """What the ranks of a rollout tell each other; alone, a rank only hears itself.

    Args:
        device: of the model, for the messages.
        together: whether there are others who must be heard.
    """

    def __init__(self, device: torch.device, together: bool):
        self.device = device
        self.together = together

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank. A collective call."""
        if not self.together:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.float32, device=self.device)
        distributed.all_reduce(values)
        return [value > 0 for value in values.tolist()]
