"""Turns from vLLM through TRL's own `vllm_generation`, colocated or served, one synchronous batch a round."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gvpo_trl.rollout.types import Generate, Turn, TurnRequest


@contextmanager
def vllm_session(trainer: Any) -> Iterator[Generate]:
    """Yield a `Generate` over the trainer's vLLM engine; TRL has synchronized its weights before the rollout.

    Args:
        trainer: a `GVPOTrainer` with `use_vllm=True`.

    Raises:
        ValueError: with several processes in server mode or with tensor parallelism, where TRL's `generate` is a
            collective call that needs the same number of rows on every rank.
    """
    engine = trainer.vllm_generation
    processes = trainer.accelerator.num_processes
    if processes > 1 and (engine.mode == "server" or engine.tensor_parallel_size > 1):
        raise ValueError(
            f"vllm_mode={engine.mode!r} with vllm_tensor_parallel_size={engine.tensor_parallel_size} on {processes} "
            "processes: trajectories end at different turns, so ranks would hold different numbers of rows. Use "
            "vllm_mode='colocate' with vllm_tensor_parallel_size=1, or one process."
        )
    budget = engine.max_completion_length

    def generate(requests: Sequence[TurnRequest]) -> list[Turn]:
        engine.max_completion_length = max(request.max_new_tokens for request in requests)
        _, ids, logprobs, _ = engine.generate([request.ids for request in requests], images=None, num_generations=1)
        logprobs = [None] * len(ids) if logprobs is None else [[top[0] for top in tops] for tops in logprobs]
        return [
            Turn(
                ids=list(row[: request.max_new_tokens]),
                logprobs=None if sampled is None else sampled[: request.max_new_tokens],
            )
            for row, sampled, request in zip(ids, logprobs, requests, strict=True)
        ]

    try:
        yield generate
    finally:
        engine.max_completion_length = budget
