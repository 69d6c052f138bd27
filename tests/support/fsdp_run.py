"""Runs one of two ranks of a sharded model: `torchrun … fsdp_run.py FOLDER` writes its results to FOLDER/rankN.json.

Accelerate has no FSDP on a CPU, but transformers can shard a model there while it loads it.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from gvpo_trl import MultiTurnRollout
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import make_trainer

ROUNDS = {0: [[0]], 1: [[0, 1], [0], [0, 1, 2], [2]]}
"""The trajectories in each round of each rank. A new trajectory begins in the third round of rank 1."""


def turns(generate: TransformersGenerate, rounds: list[list[int]]) -> list[list[int]]:
    """Return the sampled ids of all turns in order."""
    histories = {row: [5 + row] * (4 + 3 * row) for row in range(3)}
    taken = []
    for number, rows in enumerate(rounds):
        torch.manual_seed(number)
        requests = [TurnRequest(trajectory=row, ids=histories[row], max_new_tokens=2 + number) for row in rows]
        for request, turn in zip(requests, generate(requests), strict=True):
            taken.append(turn.ids)
            histories[request.trajectory] = request.ids + turn.ids + [9, 8]
    return taken


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    tokenizer = tiny_tokenizer()
    if rank == 0:
        tiny_model(tokenizer).save_pretrained(folder / "model")
    distributed.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(fsdp_size=distributed.get_world_size())
    )
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    trainer = make_trainer(
        folder / "out",
        model=model,
        tokenizer=tokenizer,
        rollout_func=MultiTurnRollout(ToyEnvironment(), max_turns=1 if rank == 0 else 4),
        per_device_train_batch_size=2,
        max_turn_length=20,
        max_steps=2,
        learning_rate=1e-2,
        ddp_backend="gloo",
    )
    forwards = []
    model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))

    with trainer.generation_session() as generate:
        sampled = turns(generate, ROUNDS[rank])
    generation_forwards = len(forwards)
    whole = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    alone = TransformersGenerate(
        whole,
        trainer.generation_config,
        trainer.eos_token_ids,
        trainer.processing_class.pad_token_id,
        kv_cache_tokens=1000,
    )

    before = weights(model)
    trainer.train()
    result = {
        "sharded": sharded,
        "same": sampled == turns(alone, ROUNDS[rank]),
        "generation_forwards": generation_forwards,
        "forwards": len(forwards),
        "moved": weights(model) != before,
        "weights": weights(model),
        "log": trainer.state.log_history,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    distributed.destroy_process_group()


def weights(model: torch.nn.Module) -> float:
    """Return the sum of the absolute values of all weights over both ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # some modules keep gathered weights after a forward
    return sum(parameter.full_tensor().double().abs().sum().item() for parameter in model.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
