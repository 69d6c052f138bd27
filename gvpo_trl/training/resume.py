"""Makes a run that resumes from a checkpoint the same run, bit for bit, as one that was never interrupted.

TRL generates trajectories for several optimizer steps at once and keeps them in a buffer, which its checkpoints leave
out, just as they leave out the loss and the metrics that no log has shown yet. This module saves them beside each
checkpoint:

    output_dir/checkpoint-3/             written by transformers
    output_dir/_resume/checkpoint-3/     written by this module, one file per rank

The buffer holds the token ids of the tasks' texts, so it lies outside the checkpoint's folder: the Trainer and the
trackers upload that folder, but they never upload a folder whose name begins with an underscore. The files go when
their checkpoint goes (`save_total_limit`).

A file holds the micro-batches that have not been trained on for the last time: about 16 bytes for each token of a
padded prompt and 32 bytes for each token of a padded completion. A checkpoint at the end of a generation batch has no
buffer, and its files take a few kilobytes.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length, sort_checkpoints

from gvpo_trl.rollout.prefetch import Prefetch

logger = logging.getLogger(__name__)

FOLDER = "_resume"
SCHEMA = 1
_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
)


class Resume(TrainerCallback):
    """Saves the state of a trainer that TRL's checkpoints leave out, and restores it.

    Args:
        trainer: a `GVPOTrainer`, to whose callbacks this object adds itself.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._epochs = 0
        self._loss: dict[str, Any] | None = None
        trainer.add_callback(self)

    def save(self, run_dir: str | Path) -> None:
        """Write this rank's file for the checkpoint of the current step.

        Every rank has written its file before any rank returns, so a checkpoint that the caller writes afterwards is
        never without it.

        Args:
            run_dir: the folder that gets the checkpoint's folder.
        """
        trainer, run_dir = self.trainer, Path(run_dir)
        folder = run_dir / FOLDER / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if trainer.args.save_only_model:
            shutil.rmtree(folder, ignore_errors=True)  # it belongs to a checkpoint that is overwritten now
            return
        record = {
            "schema": SCHEMA,
            "settings": _settings(trainer),
            "global_step": trainer.state.global_step,
            "step": trainer._step,
            "buffer": self._rest_of_buffer(),
            "metrics": {name: [float(each) for each in values] for name, values in trainer._metrics["train"].items()},
            "logs": _read_logs(trainer._logs) if trainer.log_completions else "{}",
            "loss": {"sum": trainer._tr_loss.detach().cpu(), "since": trainer._globalstep_last_logged},
            "rolled_out": _prefetch(trainer).rolled_out_last if _prefetch(trainer) else None,
        }
        path = folder / _file_name(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        torch.save(record, unfinished)
        os.replace(unfinished, path)
        trainer.accelerator.wait_for_everyone()

    def prune(self, run_dir: str | Path) -> None:
        """Delete the files of checkpoints that are gone."""
        if self.trainer.args.should_save:
            for folder in (Path(run_dir) / FOLDER).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if not (Path(run_dir) / folder.name).exists():
                    shutil.rmtree(folder, ignore_errors=True)

    def begin(self, checkpoint: str | None, epochs: int, batches: int) -> tuple[int, int]:
        """Restore what a checkpoint goes with, and return the position in the data at which training goes on.

        Without a checkpoint, what an earlier run of the same trainer has left behind is forgotten.

        Args:
            checkpoint: the folder of the checkpoint, or `None` for a new run.
            epochs: number of finished epochs according to transformers.
            batches: number of batches to skip in the current epoch according to transformers.
        """
        self._forget()
        if checkpoint is None:
            return epochs, batches
        if not has_length(self.trainer.train_dataset) and not self.trainer.args.ignore_data_skip:
            epochs, batches = self._position_in_stream(Path(checkpoint), epochs, batches)
        self._epochs = epochs
        record, reason = self._read(Path(checkpoint))
        if self._all_ranks(record is not None):
            self._restore(record)
        else:
            self._generate_anew(checkpoint, batches, reason)
        return epochs, batches

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        """Restore what transformers resets when training begins: the loss since the last log, and the sampler."""
        trainer = self.trainer
        if self._loss is not None:
            trainer._tr_loss = self._loss["sum"].to(trainer._tr_loss)
            trainer._globalstep_last_logged = self._loss["since"]
            # The next log adds the restored loss to the total of this call, to which it does not belong.
            trainer._total_loss_scalar = -trainer.accelerator.gather(trainer._tr_loss.reshape(1)).mean().item()
        if sampler := _shuffling_sampler(train_dataloader):
            for _ in range(self._epochs):
                next(iter(sampler), None)  # each epoch draws one permutation from the sampler's generator

    def _forget(self) -> None:
        trainer, self._loss, self._epochs = self.trainer, None, 0
        trainer._step, trainer._buffered_inputs, trainer._current_train_step_time = 0, None, 0.0
        trainer._metrics["train"].clear()
        if prefetch := _prefetch(trainer):
            prefetch.rolled_out_last = None

    def _rest_of_buffer(self) -> list[dict[str, Any] | None] | None:
        """Return the buffered micro-batches, `None` for each that is not needed again, or `None` if none is."""
        trainer = self.trainer
        position = trainer._step % _batches_per_generation(trainer)
        if position == 0 or trainer._buffered_inputs is None:
            return None
        size = trainer.args.steps_per_generation
        is_last_pass = position > size * (trainer.num_iterations - 1)
        used = position % size if is_last_pass else 0
        return [None if n < used else _to_cpu(batch) for n, batch in enumerate(trainer._buffered_inputs)]

    def _read(self, checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
        """Return this rank's record of a checkpoint, or `None` and the reason why there is none."""
        path = checkpoint.parent / FOLDER / checkpoint.name / _file_name(self.trainer)
        if not path.is_file():
            return None, f"{path} does not exist (save_only_model=True writes none)"
        try:
            record = torch.load(path, map_location="cpu", weights_only=True)
            same_step = record["schema"] == SCHEMA and record["global_step"] == self.trainer.state.global_step
            saved = dict(record["settings"])
        except Exception as error:  # the file may hold anything; torch and its unpickler raise many classes
            return None, f"{path} cannot be read ({type(error).__name__})"
        if not same_step:
            return None, f"{path} belongs to another checkpoint"
        changed = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in _settings(self.trainer).items()
            if saved.get(name) != value
        ]
        return (None, "; ".join(changed)) if changed else (record, "")

    def _restore(self, record: dict[str, Any]) -> None:
        trainer = self.trainer
        trainer._step = record["step"]
        trainer._buffered_inputs = send_to_device(record["buffer"], trainer.accelerator.device)
        for name, values in record["metrics"].items():
            trainer._metrics["train"][name].extend(values)
        _write_logs(trainer._logs, record["logs"])
        self._loss = record["loss"]
        if prefetch := _prefetch(trainer):
            prefetch.rolled_out_last = record["rolled_out"]

    def _generate_anew(self, checkpoint: str, batches: int, reason: str) -> None:
        """Keep the place in the generation batch without its trajectories, so that TRL generates its rest anew."""
        trainer, period = self.trainer, _batches_per_generation(self.trainer)
        trainer._step = batches % period
        if trainer._step:
            steps = math.lcm(period, trainer.args.gradient_accumulation_steps)
            logger.warning(
                f"{checkpoint} was saved in the middle of a generation batch, and its trajectories are not there"
                f"{f': {reason}' if reason else ' on another rank'}. The remaining {period - trainer._step} of "
                f"{period} micro-batches are generated anew, so this is not the same run. Checkpoints at multiples of "
                f"{steps // trainer.args.gradient_accumulation_steps} steps need no trajectories: set save_steps to "
                "one of them."
            )

    def _position_in_stream(self, checkpoint: Path, epochs: int, batches: int) -> tuple[int, int]:
        """Return the epoch of a stream, and the batches taken in it, from the fractional epoch in the checkpoint.

        A stream has no length, so transformers takes all steps for one epoch, even if the stream has begun anew.
        """
        saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if not saved.epoch or not saved.max_steps:
            return epochs, batches
        finished = math.ceil(saved.epoch) - 1
        length = saved.max_steps * self.trainer.args.gradient_accumulation_steps
        return finished, round((saved.epoch - finished) * length)

    def _all_ranks(self, here: bool) -> bool:
        accelerator = self.trainer.accelerator
        flag = torch.tensor(float(here), device=accelerator.device)
        return accelerator.reduce(flag, reduction="sum").item() == accelerator.num_processes


def last_checkpoint(run_dir: str | Path) -> str | None:
    """Return the newest checkpoint in a folder that was written to its end, or `None` if there is none.

    A run that was killed while it saved has left an incomplete checkpoint. Its `trainer_state.json`, which is written
    last, is missing or cut off.
    """
    checkpoints = sort_checkpoints(str(run_dir)) if Path(run_dir).is_dir() else []
    for checkpoint in reversed(checkpoints):
        try:
            TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError):
            logger.warning(f"{checkpoint} is left out: it is incomplete, as after a kill during the save.")
        else:
            return checkpoint
    return None


def _settings(trainer: Any) -> dict[str, int]:
    """Return what decides which rows a rank's buffer holds."""
    settings = {name: getattr(trainer.args, name) for name in _SETTINGS}
    return {"processes": trainer.accelerator.num_processes, **settings}


def _batches_per_generation(trainer: Any) -> int:
    return trainer.args.steps_per_generation * trainer.num_iterations


def _file_name(trainer: Any) -> str:
    return f"rank{trainer.accelerator.process_index}.pt"


def _prefetch(trainer: Any) -> Any:
    prefetch = getattr(trainer.rollout_func, "prefetch", None)
    return (
        prefetch if isinstance(prefetch, Prefetch) else None
    )  # a user's own function may use the name for another thing


def _to_cpu(value: Any) -> Any:
    """Return a copy of nested tensors without the storage that they share with others."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {name: _to_cpu(each) for name, each in value.items()}
    return [_to_cpu(each) for each in value] if isinstance(value, list | tuple) else value


def _read_logs(logs: Mapping[str, Any]) -> str:
    """Return TRL's table of completions as JSON, without images. Values that JSON does not know become strings."""
    rows = {
        name: {column: list(each) for column, each in values.items()} if isinstance(values, dict) else list(values)
        for name, values in logs.items()
        if name != "images"
    }
    return json.dumps(rows, default=str)


def _write_logs(logs: Mapping[str, Any], text: str) -> None:
    for name, values in json.loads(text).items():
        if isinstance(values, dict):
            for column, each in values.items():
                logs[name][column].extend(each)
        else:
            logs[name].extend(values)


def _shuffling_sampler(dataloader: Any) -> Any:
    """Return the sampler of a data loader if it draws from a generator of its own, and otherwise `None`."""
    batches = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    return sampler if isinstance(getattr(sampler, "generator", None), torch.Generator) else None
