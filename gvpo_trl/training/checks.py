"""What a data set, a tokenizer and the rows of a rollout must hold; the failed tokens of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from gvpo_trl.rollout.chat import Chat


def check_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Say what is missing in a data set before a model is loaded.

    Raises:
        ValueError: without rows, without `prompt` or `task_id`, or with prompts that are no conversations.
    """
    if train_dataset is None:
        raise ValueError("train_dataset is missing; pass one with 'prompt' and 'task_id', as load_tasks makes it.")
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
        if not hasattr(dataset, "__len__"):  # a stream is checked where it is read
            continue
        if len(dataset) == 0:
            raise ValueError(f"{name} is empty; choose another split or wider difficulties.")
        prompt = dataset[0]["prompt"]
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]):
            raise ValueError(
                f"{name}'s column 'prompt' must hold lists of messages with 'role' and 'content', not {prompt!r}."
            )


def check_chat(model: Any, processing_class: Any, args: Any, dataset: Any) -> None:
    """Say what is missing in the tokenizer, and whether a prompt leaves room for a turn, before a model is loaded.

    Args:
        model: its name where it is still to be loaded; its tokenizer is read first then.
        processing_class: the tokenizer or processor that was given, if any.
        args: a `GVPOConfig`.
        dataset: the training tasks, of which the first prompt is measured.

    Raises:
        ValueError: without a usable chat template, or when the prompt fills `max_context_length`.
    """
    if processing_class is None:
        source = model if isinstance(model, str) else model.config._name_or_path
        if not source:
            return  # TRL says that a tokenizer is missing
        revision = (args.model_init_kwargs or {}).get("revision")
        processing_class = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=args.trust_remote_code
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    chat = Chat(tokenizer, [tokenizer.eos_token_id], template_kwargs=args.chat_template_kwargs)
    length = len(chat.prompt_ids(next(iter(dataset))["prompt"]))
    if args.max_context_length is not None and length >= args.max_context_length:
        raise ValueError(
            f"max_context_length={args.max_context_length} leaves no room for a turn: the first task's prompt has "
            f"{length} tokens. Raise it, or use a shorter prompt."
        )


def check_sampling(args: Any) -> None:
    """Say that greedy sampling cannot train.

    Args:
        args: a `GVPOConfig`.

    Raises:
        ValueError: when every trajectory of a group would be the same.
    """
    greedy = (args.generation_kwargs or {}).get("do_sample") is False
    if args.temperature == 0 or greedy:
        raise ValueError(
            f"{'generation_kwargs={do_sample: False}' if greedy else 'temperature=0'} samples the same turns in every "
            "trajectory of a group, so nothing can be learnt; train with a temperature above 0 (the default is 1.0) "
            "and keep greedy sampling for evaluation."
        )


def check_rows(
    completion_ids: Sequence[Sequence[int]],
    env_mask: Sequence[Sequence[int]] | None,
    failed_mask: Sequence[Sequence[int]] | None,
) -> None:
    """Say what a `rollout_func` left out: TRL itself takes a mask that is missing, short or cut for one of ones.

    Raises:
        ValueError: without one of the masks, or when they don't hold one value for each token of `completion_ids`.
    """
    for name, masks in (("env_mask", env_mask), ("failed_mask", failed_mask)):
        if masks is None:
            raise ValueError(f"rollout_func returned no {name!r}; return one list of 0 and 1 per completion.")
        if len(masks) != len(completion_ids):
            raise ValueError(f"{name} has {len(masks)} rows for {len(completion_ids)} completions.")
        for row, (marks, ids) in enumerate(zip(masks, completion_ids, strict=True)):
            if len(marks) != len(ids):
                raise ValueError(f"{name} of row {row} has {len(marks)} values for a completion of {len(ids)} tokens.")


def failed_tokens(rows: Sequence[dict[str, Any]], action_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) true on the shaped tokens of failed steps, from the rows' `failed_mask` lists.

    Args:
        rows: B rows of the batch with what the rollout returned.
        action_mask: (B, T); a row without any action was taken out of the loss (`mask_truncated_completions`).
    """
    failed = torch.zeros_like(action_mask, dtype=torch.bool)
    for row, example in enumerate(rows):
        marks = torch.tensor(example["failed_mask"], dtype=torch.bool, device=action_mask.device)
        failed[row, : len(marks)] = marks
    return failed & action_mask.bool().any(dim=1, keepdim=True)
