"""What a data set for the trainer must hold."""

from typing import Any


def check_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Say what is missing in a data set before a model is loaded.

    Raises:
        ValueError: without rows, without `prompt` or `task_id`, or with prompts that are no conversations.
    """
    evals = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for name, dataset in (("train_dataset", train_dataset), *(("eval_dataset", each) for each in evals)):
        columns = getattr(dataset, "column_names", None)
        if columns is None:
            continue
        for column in ("prompt", "task_id"):
            if column not in columns:
                raise ValueError(
                    f"{name} has no column {column!r} (it has {', '.join(columns)}); make it with "
                    "load_tasks, or add it."
                )
        if len(dataset) == 0:
            raise ValueError(f"{name} is empty.")
        if not isinstance(dataset[0]["prompt"], list):
            raise ValueError(f"{name}'s column 'prompt' must hold lists of messages with 'role' and 'content'.")
