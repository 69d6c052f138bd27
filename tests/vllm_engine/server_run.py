"""Samples on one of two ranks that share a server: `torchrun … server_run.py FOLDER MODEL URL` writes rankN.json.

The ranks have different numbers of live trajectories, and turns of different numbers and lengths.
"""

import json
import sys
from pathlib import Path

import torch
from trl.generation.vllm_client import VLLMClient

from gvpo_trl.rollout.types import StreamingGenerate, TurnRequest
from tests.support.tiny import tiny_tokenizer
from tests.support.training import make_trainer
from tests.vllm_engine.conftest import CONTEXT

ROUNDS = {0: [[0]], 1: [[0, 1, 2], [0, 2], [2]]}
"""The trajectories in each round of each rank."""


def converse(turns: StreamingGenerate, rank: int) -> list[list[int]]:
    """Return the sampled ids of all turns of a rank in order."""
    histories = {row: [5 + 10 * rank + row] * (20 + row) for row in range(3)}
    taken = []
    for number, rows in enumerate(ROUNDS[rank]):
        requests = [TurnRequest(trajectory=row, ids=histories[row], max_new_tokens=3 + row + number) for row in rows]
        futures = [turns.submit(request) for request in requests]
        while not all(future.done() for future in futures):
            turns.advance()
        for request, future in zip(requests, futures, strict=True):
            taken.append(future.result().ids)
            histories[request.trajectory] = request.ids + taken[-1] + [9, 8]
    return taken


def main(folder: Path, model: str, url: str) -> None:
    VLLMClient.init_communicator = lambda self, device: None  # NCCL needs a GPU
    VLLMClient.update_named_params = lambda self, metadata, params: list(params)
    trainer = make_trainer(
        folder / "out",
        model=model,
        tokenizer=tiny_tokenizer(),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        max_context_length=CONTEXT,
        max_turn_length=24,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.0,
        ddp_backend="gloo",
    )
    trainer.vllm_generation.generation_kwargs = {"temperature": 0.0}  # a GVPOConfig refuses to train like that
    rank = trainer.accelerator.process_index
    with trainer.generation_session() as turns:
        together = converse(turns, rank)
    alone = None
    with trainer.generation_session() as turns:
        if rank == 0:  # this rank exchanges turns while the other one has none
            alone = [converse(turns, 0), converse(turns, 1)]
    trainer.train()
    result = {"together": together, "alone": alone, "log": trainer.state.log_history}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
