"""Compares the training step of `GVPOTrainer` with stock `GRPOTrainer`'s: `python -m benchmarks.train_step`.

Both run `compute_loss` and the backward pass on the same ids, masks and advantages, in turn, on a model with random
weights. TRL gets one advantage per row, `GVPOTrainer` one per token. `--tied` is the share of rows whose advantages
are all 0, which the training step may leave out; by default there are none. On a GPU, memory is the device's peak;
elsewhere, it is the peak of what torch's profiler has seen allocated and not yet freed.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import finish, interleaved, random_qwen2, ratio
from gvpo_trl import GVPOConfig, GVPOTrainer, MultiTurnRollout
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import ToyEnvironment

CUDA = torch.cuda.is_available()


def main() -> None:
    options = _options()
    trainers = {"trl": _trainer(options, GRPOTrainer), "ours": _trainer(options, GVPOTrainer)}
    batches = {"trl": _batch(options, per_token=False), "ours": _batch(options, per_token=True)}
    losses: dict[str, list[float]] = {name: [] for name in trainers}

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            trainer = trainers[name]
            trainer.model.zero_grad()
            loss = trainer.compute_loss(trainer.model, dict(batches[name]))
            loss.backward()
            if CUDA:
                torch.cuda.synchronize()
            losses[name].append(loss.item())

        return run

    steps = {name: step(name) for name in trainers}
    interleaved(steps, 1)  # fills the caches
    seconds, _ = interleaved(steps, options.repeats)
    memory = {name: _peak_bytes(run) for name, run in steps.items()}
    gradients = [torch.cat([p.grad.flatten() for p in trainer.model.parameters()]) for trainer in trainers.values()]
    finish(
        {
            "benchmark": "train_step",
            "device": torch.cuda.get_device_name() if CUDA else "cpu",
            "threads": torch.get_num_threads(),
            "trl_s": statistics.median(seconds["trl"]),
            "ours_s": statistics.median(seconds["ours"]),
            "time_ratio": ratio(seconds["ours"], seconds["trl"]),
            "memory_ratio": memory["ours"] / memory["trl"],
            "trl_peak_mb": memory["trl"] / 2**20,
            "ours_peak_mb": memory["ours"] / 2**20,
            "largest_gradient_difference": (gradients[0] - gradients[1]).abs().max().item(),
        }
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn", type=int, default=40, help="sampled tokens of each turn")
    parser.add_argument("--observation", type=int, default=80, help="tokens after each turn that are not sampled")
    parser.add_argument("--tied", type=float, default=0.0, help="share of rows whose advantages are all 0")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


def _trainer(options: argparse.Namespace, kind: type) -> Any:
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.batch,
        "num_generations": options.batch,
        "max_completion_length": options.turns * (options.turn + options.observation),
        "gradient_checkpointing": False,
        "use_cpu": not CUDA,
        "bf16": False,
        "report_to": "none",
    }
    heads, intermediate = options.hidden // 64, options.hidden * 8 // 3
    model = random_qwen2(
        options.vocab, layers=options.layers, hidden=options.hidden, heads=heads, intermediate=intermediate
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "-"}], "task_id": "0"}])
    common = {"train_dataset": rows, "processing_class": tiny_tokenizer()}
    if kind is GVPOTrainer:
        rollout = MultiTurnRollout(ToyEnvironment())
        trainer = GVPOTrainer(model, args=GVPOConfig(**settings), rollout_func=rollout, **common)
    else:
        args = GRPOConfig(**settings, loss_type="grpo", epsilon_high=0.28)
        trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, **common)
    trainer.model = trainer.model.to(trainer.accelerator.device).train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _batch(options: argparse.Namespace, per_token: bool) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    length = options.turns * (options.turn + options.observation)
    sampled = torch.tensor(([1] * options.turn + [0] * options.observation) * options.turns)
    advantages = torch.linspace(-1, 1, options.batch + options.batch % 2)[: options.batch]
    advantages[: round(options.tied * options.batch)] = 0.0
    batch = {
        "prompt_ids": torch.randint(3, options.vocab, (options.batch, options.prompt), generator=draw),
        "prompt_mask": torch.ones(options.batch, options.prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, options.vocab, (options.batch, length), generator=draw),
        "completion_mask": torch.ones(options.batch, length, dtype=torch.long),
        "tool_mask": sampled.expand(options.batch, -1),
        "advantages": advantages.unsqueeze(1) * sampled if per_token else advantages,
        "num_items_in_batch": sampled.sum() * options.batch,
    }
    return {name: value.to("cuda") if CUDA else value for name, value in batch.items()}


def _peak_bytes(run: Callable[[], None]) -> int:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    allocated = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


if __name__ == "__main__":
    main()
