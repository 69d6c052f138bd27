"""Compares TRL's tool loop under `GRPOTrainer` and `GVPOTrainer`: `python -m benchmarks.tools`.

Both trainers play the SQL agent of `recipes/tools` with the same seeds and a small model that samples its own tool
calls. The learning rate is 0, so every batch can be compared. `overhead` is the ratio of the seconds of whole
generation calls, paired by batch.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import finish, ratio
from gvpo_trl import GVPOTrainer
from recipes.tools import sql_agent
from tests.support.tool_users import SQL_TURNS, fresh_model

SAME = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    classes = {"grpo": GRPOTrainer, "gvpo": GVPOTrainer}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: _trainer(each, Path(folder) / name) for name, each in classes.items()}
        rows = trainers["grpo"].train_dataset
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        identical, outside, inside = True, 0, 0
        for number in range(-1, options.batches):  # the first batch fills the caches
            inputs = [dict(rows[number % len(rows)]) for _ in range(8)]
            batches, rewards = {}, {}
            for name in sorted(trainers, reverse=number % 2 == 0):
                torch.manual_seed(number)
                start = time.perf_counter()
                batches[name] = trainers[name]._generate_and_score_completions([dict(row) for row in inputs])
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
                rewards[name] = list(trainers[name]._logs["rewards"].values())
            grpo, gvpo = batches["grpo"], batches["gvpo"]
            identical &= all(torch.equal(grpo[key], gvpo[key]) for key in SAME)
            identical &= [list(each)[-8:] for each in rewards["grpo"]] == [list(each)[-8:] for each in rewards["gvpo"]]
            failed = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row["failed_mask"]) for row in trainers["gvpo"]._call.watch.rolled_out()],
                batch_first=True,
            ).bool()
            sampled = (gvpo["completion_mask"] * gvpo["tool_mask"]).bool()
            differs = sampled & ~torch.isclose(gvpo["advantages"], grpo["advantages"].unsqueeze(1), atol=1e-6)
            outside += (differs & ~failed).sum().item()
            inside += (differs & failed).sum().item()
    finish(
        {
            "benchmark": "tools",
            "batches": options.batches,
            "identical": identical,
            "differing_tokens_outside_failures": outside,
            "differing_tokens_inside_failures": inside,
            "overhead": ratio(seconds["gvpo"], seconds["grpo"]),
        }
    )


def _trainer(trainer_class: type[GRPOTrainer], folder: Path) -> Any:
    model, tokenizer = fresh_model(SQL_TURNS)
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=8,
        max_completion_length=2000,
        max_tool_calling_iterations=4,
        chat_template_kwargs={"enable_thinking": False},
    )
    trainer = sql_agent.make_trainer(model, args, trainer_class, processing_class=tokenizer)
    trainer.model.train()
    return trainer


if __name__ == "__main__":
    main()
