"""Trainers of the tiny model whose turns follow a script. Only the sampling is replaced."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from gvpo_trl import GVPOConfig, GVPOTrainer, MultiTurnRollout
from gvpo_trl.environments.base import Score
from gvpo_trl.faults import EvaluatorFault
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import Scripted, ToyEnvironment


def code(source: str) -> str:
    """Return the text of a turn that runs the source."""
    return f"```python\n{source}\n```"


FAIL = code("1/0")
LOST = code("lost = True\n1 / 0")
"""A turn that fails and makes the evaluator crash at the end, also on the retry."""


def finish(passed: int, failed: int) -> str:
    """Return the text of a turn that completes the task with these numbers of passed and failed tests."""
    return code(f"score = ({passed}, {failed})\ndone()")


def score_of(space: dict) -> Score:
    """Return the score that the code of `finish` or `LOST` has left in its namespace."""
    if space.get("lost"):
        raise EvaluatorFault("the evaluator crashed")
    passed, failed = space.get("score", (0, 1))
    return Score(
        passed=tuple(f"passed {n}" for n in range(passed)), failed=tuple(f"failed {n}" for n in range(failed))
    )


def tasks(count: int, **columns: Any) -> Dataset:
    """Return a data set of the tasks `t0_1`, `t0_2`, `t0_3`, `t1_1` and so on, with three variants per scenario."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"Do task {n}."}],
                "task_id": f"t{n // 3}_{n % 3 + 1}",
                **{name: values[n] for name, values in columns.items()},
            }
            for n in range(count)
        ]
    )


class ScriptedTrainer(GVPOTrainer):
    """A trainer that plays the turns of `script(row number, row)` instead of sampling, and keeps the loss's inputs."""

    script: Callable[[int, dict], list[str]] | None = None

    def generation_session(self, end_ids=None):
        if self.script is None:
            return super().generation_session(end_ids)
        rows = self.rollout_context().rows
        turns = {number: self.script(number, row) for number, row in enumerate(rows)}
        return nullcontext(Scripted(self._tokenizer, turns))

    def _compute_loss(self, model, inputs):
        self.__dict__.setdefault("loss_inputs", []).append(inputs)
        return super()._compute_loss(model, inputs)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of one generation batch, repeated as TRL's sampler repeats them without shuffling."""
        groups = self.args.generation_batch_size // self.num_generations
        return [dict(self.train_dataset[n]) for n in range(groups) for _ in range(self.num_generations)]

    def one_batch(self, rows: list[dict[str, Any]] | None = None) -> dict[str, torch.Tensor]:
        """Roll out one batch and return what TRL's `_prepare_inputs` buffers, before it is shuffled."""
        self.model.train()
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps  # set by `train()`
        return self._generate_and_score_completions(self.rows() if rows is None else rows)


def make_trainer(
    folder: Path,
    script: Callable[[int, dict], list[str]] | list[list[str]] | None = None,
    *,
    train_dataset: Dataset | None = None,
    model: Any = None,
    tokenizer: Any = None,
    trainer_class: type[ScriptedTrainer] = ScriptedTrainer,
    **options: Any,
) -> ScriptedTrainer:
    """Make a trainer on 4 tasks, with 4 trajectories per group and one group per batch.

    Args:
        folder: output directory.
        script: a function that returns the turns of a row, or a list with the turns of each row; by default the model
            samples.
        train_dataset: by default 4 tasks.
        model: by default the tiny Qwen2.
        tokenizer: by default the byte tokenizer.
        trainer_class: a class with additional hooks.
        options: fields of `GVPOConfig` or arguments of the trainer.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    names = ("reward_funcs", "eval_dataset", "peft_config", "rollout_func", "callbacks", "step_advantages")
    arguments = {name: options.pop(name) for name in names if name in options}
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 1,
        "max_turns": 3,
        "max_turn_length": 100,
        "max_completion_length": 1000,
    }
    arguments.setdefault("rollout_func", MultiTurnRollout(ToyEnvironment(score=score_of)))
    trainer = trainer_class(
        model=model or tiny_model(tokenizer),
        args=GVPOConfig(output_dir=str(folder), **(defaults | options)),
        train_dataset=tasks(4) if train_dataset is None else train_dataset,
        processing_class=tokenizer,
        **arguments,
    )
    if isinstance(script, list):
        trainer.script = lambda number, row: script[number % len(script)]
    else:
        trainer.script = script
    return trainer
