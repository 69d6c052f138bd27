"""Warns of prompts that leave less room than one turn needs, before anything is sampled."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from gvpo_trl.rollout.chat import Chat
from gvpo_trl.text import printable_line

FIRST_ROWS = 8
"""Rows of a stream that are looked at, since a stream may have no end."""


def warn_of_little_room(trainer: Any, dataset: Iterable[Mapping[str, Any]]) -> None:
    """Warn on the main process if the longest prompt of a data set leaves less room than one turn may take.

    Args:
        trainer: a `GVPOTrainer`; a rollout function without budgets is not looked at.
        dataset: rows with `prompt`; the prompt with the most characters is measured.
    """
    context = trainer.rollout_context()
    if not hasattr(trainer.rollout_func, "budgets") or not trainer.is_world_process_zero():
        return
    budgets = trainer.rollout_func.budgets(context)
    row = max(_rows(dataset), key=lambda row: sum(len(str(message)) for message in row["prompt"]), default=None)
    if row is None:
        return
    chat = Chat(
        context.tokenizer,
        context.end_ids,
        template=context.chat_template,
        template_kwargs=context.chat_template_kwargs,
    )
    prompt = len(chat.prompt_ids(row["prompt"], row.get("datetime")))
    room = budgets.room(prompt)
    if room >= budgets.max_turn_length:
        return
    if room == budgets.max_completion_length:
        cause, remedy = f"max_completion_length={room}", "raise max_completion_length"
    else:
        cause = (
            f"the prompt of task {printable_line(str(row.get('task_id')))} has {prompt} tokens of a context of "
            f"{budgets.max_context_length}, which"
        )
        remedy = "use a shorter prompt (load_tasks has prompt='compact') or a model with a longer context"
    warnings.warn(
        f"{cause} leaves {max(room, 0)} tokens for all turns, but one turn may take "
        f"max_turn_length={budgets.max_turn_length}: trajectories will end for lack of tokens. To mend it, {remedy}, "
        "or lower max_turn_length.",
        stacklevel=3,
    )


def _rows(dataset: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    if hasattr(dataset, "__len__"):
        return dataset
    return (row for _, row in zip(range(FIRST_ROWS), dataset, strict=False))
