"""A trainer that plays scripts instead of sampling. Everything after the sampling is the package's own code."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common import random_qwen2
from benchmarks.faults.scripts import TURNS, Script, Scripts
from gvpo_trl import GVPOConfig, GVPOTrainer, MultiTurnRollout
from gvpo_trl.environments.appworld import load_tasks
from gvpo_trl.rollout.types import Generate, Turn, TurnRequest
from recipes.quickstart.tokenizer import build_tokenizer

PENALTY = 0.2


class ScriptedTrainer(GVPOTrainer):
    """A trainer that plays each row's script."""

    book: Scripts
    scripts: Sequence[Script] = ()
    """The scripts of the rows of the next batch."""

    def generation_session(self, end_ids: Sequence[int] | None = None) -> AbstractContextManager[Generate]:
        """A generator that knows the turns of the rows."""
        return nullcontext(_Player(self.processing_class, [self.book.turns(script) for script in self.scripts]))


class _Player:
    """A `Generate` that plays scripts. A row whose request is as long as its first one begins its script again."""

    def __init__(self, tokenizer: Any, texts: list[list[str]]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._first: dict[int, int] = {}
        self._turn: dict[int, int] = {}

    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        return [Turn(ids=self._next(request)) for request in requests]

    def _next(self, request: TurnRequest) -> list[int]:
        row = request.trajectory
        if len(request.ids) == self._first.setdefault(row, len(request.ids)):
            self._turn[row] = 0
        texts = self._texts[row]
        text = texts[min(self._turn[row], len(texts) - 1)]
        self._turn[row] += 1
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] + [self._tokenizer.eos_token_id]
        assert len(ids) <= request.max_new_tokens, "the budgets leave room for every turn"
        return ids


def make_trainer(
    root: Path, folder: Path, book: Scripts, rollout: MultiTurnRollout, group: int, **options: Any
) -> ScriptedTrainer:
    """Make a trainer on the book's tasks, whose model never samples.

    Args:
        root: data root of the tasks.
        folder: output directory.
        book: the scripts' turns.
        rollout: the rollout, with its environments.
        group: trajectories of a task.
        options: further arguments of `GVPOConfig`.
    """
    tokenizer = build_tokenizer(root / "data" / "api_docs" / "standard")
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": group,
        "num_generations": group,
        "max_turns": TURNS,
        "max_turn_length": 1000,
        "max_observation_length": 100,
        "max_completion_length": 20000,
        "failure_penalty": PENALTY,
        "log_trajectories": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
    }
    trainer = ScriptedTrainer(
        random_qwen2(len(tokenizer), layers=1, hidden=32, heads=2, intermediate=32),
        args=GVPOConfig(**settings | options),
        train_dataset=load_tasks(book.task_ids, root=root, prompt="compact"),
        rollout_func=rollout,
        processing_class=tokenizer,
    )
    trainer.book = book
    trainer.current_gradient_accumulation_steps = 1  # set by `train()`
    return trainer
