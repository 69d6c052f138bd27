"""Checks data sets, tokenizers, sampling settings and a rollout's rows, with errors that name the remedy."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoTokenizer

from gvpo_trl.environments.interface import try_environment
from gvpo_trl.rollout.chat import Chat


def check_rollout(options: Mapping[str, Any], failure_span: str, hooks: Sequence[Any] = ()) -> bool:
    """Check that either a rollout function or TRL's own tool loop runs the trajectories.

    Args:
        options: the trainer's keyword arguments.
        failure_span: the tokens of a failed step that are shaped.
        hooks: the trainer's hooks for tools, false where the user gave none.

    Returns:
        Whether TRL's own loop runs them.

    Raises:
        ValueError: nothing runs the trajectories, or two things do, or an option needs the other one.
    """
    has_tools = bool(options.get("tools") or options.get("environment_factory"))
    if options.get("rollout_func") is None and not has_tools:
        raise ValueError(
            "rollout_func is missing; pass MultiTurnRollout(environments), or tools or environment_factory for TRL's "
            "own tool loop."
        )
    if options.get("rollout_func") is not None and has_tools:
        raise ValueError("tools and environment_factory run TRL's own loop; pass these or rollout_func, not both.")
    if has_tools and failure_span != "turn":
        raise ValueError(
            f"failure_span={failure_span!r} needs turns with fenced code; with tools only 'turn' is possible."
        )
    if not has_tools and any(hooks):
        raise ValueError("tool_verdict and tool_faults are about tools; pass tools or environment_factory as well.")
    return has_tools


def check_extras(args: Any) -> None:
    """Check that an optional package is there where an option needs it.

    Args:
        args: a `GVPOConfig`.

    Raises:
        ValueError: the package is missing; the message names the extra that installs it.
    """
    if args.use_vllm and importlib.util.find_spec("vllm") is None:
        raise ValueError('use_vllm=True needs vLLM: pip install "gvpo-trl[vllm]", or leave use_vllm out.')


def check_environment_of(rollout_func: Any, dataset: Any) -> None:
    """Check that the environment of a rollout function keeps the protocol.

    Args:
        rollout_func: a rollout function; one without an environment, or `None`, is not looked at.
        dataset: the training tasks; an episode of the first one is tried.

    Raises:
        SetupError: a method or a result of the environment is wrong.
    """
    environment = getattr(rollout_func, "environments", None)
    if environment is None:
        return
    first = next(iter(dataset), {})
    if "task_id" in first:
        try_environment(environment, first["task_id"])


def check_datasets(
    train_dataset: Any, eval_dataset: Any, *, tools: bool = False, environment_factory: Any = None
) -> None:
    """Check that the data sets hold what a rollout needs, before a model is loaded.

    Args:
        train_dataset: the training tasks.
        eval_dataset: a data set, a dictionary of them, or `None`.
        tools: whether TRL's own loop runs the trajectories, which needs no `task_id`.
        environment_factory: TRL's environments, which may bring their own prompts and even their own data.

    Raises:
        ValueError: a data set has no rows or lacks a column, or its prompts are not conversations.
    """
    columns = () if environment_factory else ("prompt",) if tools else ("prompt", "task_id")
    if train_dataset is None and environment_factory:
        return
    if train_dataset is None:
        raise ValueError("train_dataset is missing; pass one with 'prompt' and 'task_id', as load_tasks makes it.")
    evals = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for name, dataset in (("train_dataset", train_dataset), *(("eval_dataset", each) for each in evals)):
        present = getattr(dataset, "column_names", None)
        if present is None:
            continue
        for column in columns:
            if column not in present:
                raise ValueError(
                    f"{name} has no column {column!r} (it has {', '.join(present)}); make it with "
                    "load_tasks, or add it."
                )
        if not hasattr(dataset, "__len__"):  # the rollout checks the rows of a stream as they come
            continue
        if len(dataset) == 0:
            raise ValueError(f"{name} is empty; choose another split or wider difficulties.")
        prompt = dataset[0].get("prompt")
        if "prompt" in present and not (
            isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]
        ):
            raise ValueError(
                f"{name}'s column 'prompt' must hold lists of messages with 'role' and 'content', not {prompt!r}."
            )


def check_chat(model: Any, processing_class: Any, args: Any, dataset: Any) -> list[int]:
    """Check the tokenizer, and that the first prompt leaves room for a turn, before a model is loaded.

    Args:
        model: the model, or its name if it is still to be loaded.
        processing_class: the tokenizer or processor; `None` loads the model's own tokenizer.
        args: a `GVPOConfig`.
        dataset: the training tasks, of which only the first prompt is measured.

    Returns:
        The ids that end a turn: the tokenizer's end-of-sequence token, and the one that the template writes.

    Raises:
        ValueError: there is no usable chat template, the data set has no first row, or its prompt fills
            `max_context_length`.
    """
    if processing_class is None:
        source = model if isinstance(model, str) else model.config._name_or_path
        if not source:
            return []  # TRL raises an error for the missing tokenizer
        revision = (args.model_init_kwargs or {}).get("revision")
        processing_class = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=args.trust_remote_code
        )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    chat = Chat(tokenizer, [tokenizer.eos_token_id], template_kwargs=args.chat_template_kwargs)
    first = next(iter(dataset), None)
    if first is None:  # a stream; the rows of a data set with a length have been counted before
        raise ValueError("train_dataset is empty; choose another split or wider difficulties.")
    length = len(chat.prompt_ids(first["prompt"]))
    if args.max_context_length is not None and length >= args.max_context_length:
        raise ValueError(
            f"max_context_length={args.max_context_length} leaves no room for a turn: the first task's prompt has "
            f"{length} tokens. Raise it, or use a shorter prompt."
        )
    return sorted(chat.end_ids)


def check_sampling(args: Any) -> None:
    """Check that sampling is not greedy, since greedy sampling cannot train.

    Args:
        args: a `GVPOConfig`.

    Raises:
        ValueError: every trajectory of a group would have the same turns.
    """
    extra = args.generation_kwargs or {}
    reasons = {
        "temperature=0": args.temperature == 0,
        "generation_kwargs={do_sample: False}": extra.get("do_sample") is False,
        "top_k=1": extra.get("top_k", args.top_k) == 1,
        "min_p=1": extra.get("min_p", args.min_p) == 1,
    }
    for reason, is_greedy in reasons.items():
        if is_greedy:
            raise ValueError(
                f"{reason} samples the same turns in every trajectory of a group, so nothing can be learnt; train "
                "with a temperature above 0 (the default is 1.0) and keep greedy sampling for evaluation."
            )


def check_eval_groups(args: Any, group_size: int) -> None:
    """Check that evaluation batches hold whole groups, which TRL checks only for evaluations during training.

    Args:
        args: a `GVPOConfig`.
        group_size: number of samples of each task in an evaluation.

    Raises:
        ValueError: a batch over all processes splits a group.
    """
    size, processes = args.per_device_eval_batch_size, args.world_size
    if size * processes % group_size:
        raise ValueError(
            f"per_device_eval_batch_size={size} on {processes} process(es) must hold whole groups of {group_size} "
            "samples; set it to a multiple of that, or set num_generations_eval."
        )


def check_rows(
    completion_ids: Sequence[Sequence[int]],
    env_mask: Sequence[Sequence[int]] | None,
    failed_mask: Sequence[Sequence[int]] | None,
) -> None:
    """Check the masks that a `rollout_func` returned. TRL would silently use ones where a mask is missing or short.

    Raises:
        ValueError: a mask is missing, or does not hold one value for each token of `completion_ids`.
    """
    for name, masks in (("env_mask", env_mask), ("failed_mask", failed_mask)):
        if masks is None:
            raise ValueError(f"rollout_func returned no {name!r}; return one list of 0 and 1 per completion.")
        if len(masks) != len(completion_ids):
            raise ValueError(f"{name} has {len(masks)} rows for {len(completion_ids)} completions.")
        for row, (marks, ids) in enumerate(zip(masks, completion_ids, strict=True)):
            if len(marks) != len(ids):
                raise ValueError(f"{name} of row {row} has {len(marks)} values for a completion of {len(ids)} tokens.")


@contextmanager
def unparsed_responses(tokenizer: Any) -> Iterator[None]:
    """Hide the parsers of a tokenizer, with which TRL would parse a conversation of several turns as one response."""
    names = ("response_template", "response_schema")
    parsers = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name, None) is not None}
    for name in parsers:
        setattr(tokenizer, name, None)
    try:
        yield
    finally:
        for name, value in parsers.items():
            setattr(tokenizer, name, value)


def failed_tokens(rows: Sequence[dict[str, Any]], action_mask: torch.Tensor) -> torch.Tensor:
    """Return (B, T), true on the tokens of failed steps, from the rows' lists `failed_mask`.

    Args:
        rows: B rows of the batch, which hold what the rollout returned.
        action_mask: (B, T). A row without any action has left the loss (`mask_truncated_completions`) and gets no
            failed token.
    """
    failed = torch.zeros_like(action_mask, dtype=torch.bool)
    for row, example in enumerate(rows):
        marks = torch.tensor(example["failed_mask"], dtype=torch.bool, device=action_mask.device)
        failed[row, : len(marks)] = marks
    return failed & action_mask.bool().any(dim=1, keepdim=True)
