"""Decides which files of a run may be uploaded to the Hub, and holds the others back.

AppWorld asks not to publish its tasks. So unless an environment says that its tasks are publishable (`TaskSource`, as
the pocket data's does), only files that cannot hold a task's text are uploaded. `UPLOADABLE` names them. Any other
file stays on this machine, whoever writes it: tables of completions, trajectories, buffers of a checkpoint, reports.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import transformers.trainer
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from gvpo_trl.environments.base import TaskSource

logger = logging.getLogger(__name__)

UPLOADABLE = (
    # weights
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json"),
    *("adapter_model*.bin", "pytorch_model_fsdp*/*", "global_step*/*", "latest", "zero_to_fp32.py"),
    # the model, its tokenizer and its chat template
    *("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.jinja"),
    # the state of the Trainer, which holds numbers and settings
    *("training_args.bin", "trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"),
    *("rng_state.pth", "rng_state_*.pth", "events.out.tfevents.*", "*/events.out.tfevents.*"),
    # the model card
    *("README.md", "training_curves.png", ".eval_results/*.yaml"),
)
"""Patterns of the files that hold no text of a task, relative to the folder that is uploaded."""


def source_of(rollout_func: Any) -> TaskSource | None:
    """Return where the tasks of a rollout come from; `None` if its environment does not say so."""
    source = getattr(getattr(rollout_func, "environments", None), "source", None)
    return source if isinstance(source, TaskSource) else None


def check_uploads(args: Any, rollout_func: Any) -> None:
    """Check what a run is asked to upload, before TRL creates a repository.

    Args:
        args: a `GVPOConfig`.
        rollout_func: the rollout, whose environment says whether its tasks may be published.

    Raises:
        ValueError: `log_completions_hub_repo` would publish the texts of the tasks, or `hub_benchmark` is malformed.
    """
    if args.log_completions and args.log_completions_hub_repo is not None and not _is_publishable(rollout_func):
        raise ValueError(
            f"log_completions_hub_repo={args.log_completions_hub_repo!r} would publish the texts of "
            f"{_name(rollout_func)}, and AppWorld asks not to republish its tasks. Leave it out: the tables stay in "
            "output_dir/completions, and gvpo-trl view shows the trajectories. Tasks of your own may be uploaded "
            "where the environment has a TaskSource with is_publishable=True as its attribute `source`."
        )
    if args.hub_benchmark is not None:
        parse_benchmark(args.hub_benchmark)


def parse_benchmark(benchmark: str) -> tuple[str, str | None]:
    """Return the data set's id and the task's id (`None` for the evaluation's split) of a `hub_benchmark`.

    Raises:
        ValueError: it is not of the form "owner/dataset" or "owner/dataset:task".
    """
    repo, _, task = benchmark.partition(":")
    try:
        validate_repo_id(repo)
        is_id = repo.count("/") == 1
    except ValueError:
        is_id = False
    if not is_id or (":" in benchmark and not task):
        raise ValueError(
            f"hub_benchmark={benchmark!r} must be the id of a benchmark on the Hub, 'owner/dataset', or one of its "
            "tasks, 'owner/dataset:task'."
        )
    return repo, task or None


@contextmanager
def only_uploadable(rollout_func: Any) -> Iterator[None]:
    """Limit what transformers' Trainer uploads in this block to `UPLOADABLE`, unless the tasks may be published.

    The Trainer calls the Hub through `hf_api()` and has no option for the files that it uploads, so the block replaces
    that function of its module.
    """
    if _is_publishable(rollout_func):
        yield
        return
    original = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: _FilteredApi(original(), _name(rollout_func))
    try:
        yield
    finally:
        transformers.trainer.hf_api = original


class _FilteredApi:
    """A client of the Hub that uploads nothing but `UPLOADABLE` of a folder.

    Args:
        api: the client that does the work.
        tasks: name of the tasks, for the log.
    """

    def __init__(self, api: Any, tasks: str):
        self._api, self._tasks = api, tasks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: Any, ignore_patterns: list[str] | None = None, **options: Any) -> Any:
        if held_back := _held_back(folder_path, ignore_patterns):
            _warn_once(self._tasks, held_back)
        return self._api.upload_folder(
            folder_path=folder_path,
            ignore_patterns=ignore_patterns,
            allow_patterns=list(UPLOADABLE),
            **options,
        )


@cache
def _warn_once(tasks: str, kinds: tuple[str, ...]) -> None:
    """Warn about the kinds of files that stay here, at the first upload that leaves them out."""
    logger.warning("These files may hold texts of %s and are not uploaded: %s.", tasks, ", ".join(kinds))


def _held_back(folder: Any, ignore_patterns: list[str] | None) -> tuple[str, ...]:
    """Return the kinds of files that the Trainer would upload and that `UPLOADABLE` does not name."""
    files = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    considered = list(filter_repo_objects(files, ignore_patterns=[*(ignore_patterns or []), ".git/*", ".cache/*"]))
    allowed = set(filter_repo_objects(considered, allow_patterns=list(UPLOADABLE)))
    paths = [Path(name) for name in considered if name not in allowed]
    return tuple(
        sorted({(path.parent / f"*{path.suffix}").as_posix() if path.suffix else str(path) for path in paths})
    )


def _is_publishable(rollout_func: Any) -> bool:
    if rollout_func is None:  # TRL's own tool loop runs on the user's own data
        return True
    source = source_of(rollout_func)
    return source is not None and source.is_publishable


def _name(rollout_func: Any) -> str:
    source = source_of(rollout_func)
    return "tasks of an unknown source" if source is None else f"tasks of {source.name}"
