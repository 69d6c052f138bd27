"""Runs of the tiny model that can be compared with runs that resume from their checkpoints."""

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import ScriptedTrainer, make_trainer

TIMED = ("runtime", "per_second", "step_time", "preparation_time", "_seconds", "train_loss")
"""Names of logged values that differ between two equal runs. `train_loss` is the mean of one call's steps."""
CASES = {
    "buffer": {"per_device_train_batch_size": 2, "steps_per_generation": 4},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "iterations": {"steps_per_generation": 2, "num_iterations": 2},
    "boundaries": {},
}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return rewards that depend on every sampled token."""
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def train(folder: Path, checkpoint: Path | bool | None = None, **options: Any) -> ScriptedTrainer:
    """Train for 10 steps with a checkpoint after each, from the beginning or from a checkpoint."""
    tokenizer = tiny_tokenizer()
    defaults = {
        "reward_funcs": reward,
        "max_steps": 10,
        "max_turns": 2,
        "max_turn_length": 6,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 3,
    }
    model = tiny_model(tokenizer, attention_dropout=0.1)
    trainer = make_trainer(folder, model=model, tokenizer=tokenizer, **(defaults | options))
    trainer.train(resume_from_checkpoint=str(checkpoint) if isinstance(checkpoint, Path) else checkpoint)
    return trainer


def log(trainer: ScriptedTrainer) -> list[dict[str, Any]]:
    """Return the run's log without the values that two equal runs do not share; NaN becomes a string."""
    return [
        {name: str(value) for name, value in entry.items() if not any(word in name for word in TIMED)}
        for entry in trainer.state.log_history
    ]


def differences(whole: ScriptedTrainer, resumed: ScriptedTrainer) -> list[str]:
    """Return what differs between a run and another one that has resumed from one of its checkpoints."""
    found = []
    weights = zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True)
    found += [f"weight {name}" for (name, one), two in weights if not torch.equal(one, two)]
    inputs = whole.loss_inputs[len(whole.loss_inputs) - len(resumed.loss_inputs) :]
    for number, (one, two) in enumerate(zip(inputs, resumed.loss_inputs, strict=True)):
        found += [f"batch {number}: {name}" for name in one.keys() | two.keys() if not _equal(one, two, name)]
    if log(whole) != log(resumed):
        found.append("log")
    return found


def _equal(one: dict, two: dict, name: str) -> bool:
    return name in one and name in two and torch.equal(one[name], two[name])
