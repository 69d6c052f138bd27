"""`gvpo-trl evaluate`: attempts a split, writes every attempt as it ends, and goes on where an earlier call stopped.

An evaluation has two files of its own, which no other evaluation writes to:

    evaluation-dev.json                 the report, written at the end
    evaluation-dev.attempts.jsonl       the settings in the first line, then one line for each attempt (per process)

The same command after Ctrl-C or a kill reads the second file and makes the attempts that are missing. These are the
same attempts as without the interruption, because each has a random stream of its own.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gvpo_trl import __version__

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import ModelConfig

    from gvpo_trl.cli.arguments import ScriptArguments
    from gvpo_trl.config import GVPOConfig
    from gvpo_trl.rollout.types import Trajectory
    from gvpo_trl.trainer import GVPOTrainer

PACKAGES = ("trl", "transformers", "torch", "peft", "accelerate")
"""Packages whose versions a report names."""
OTHERS = ("bf16", "repetition_penalty", "chat_template_kwargs", "use_vllm")
"""Fields of the configuration that change what is sampled, besides the budgets and the narrowing settings."""
FREE = ("processes",)
"""Settings that a resumed evaluation need not share with the call that began it."""


def settings_of(
    script_args: "ScriptArguments", training_args: "GVPOConfig", model_args: "ModelConfig", dataset: "Dataset"
) -> dict[str, Any]:
    """Return everything that decides an evaluation's figures, for its report."""
    from gvpo_trl.environments.appworld.setup import VERSION
    from gvpo_trl.environments.appworld.tasks import check_root, load_prompt

    template = load_prompt(script_args.prompt)
    budgets = ("max_turns", "max_turn_length", "max_observation_length", "max_completion_length", "max_context_length")
    return {
        "model": model_args.model_name_or_path,
        "revision": model_args.model_revision,
        "adapter": script_args.adapter_name_or_path,
        "split": script_args.eval_split,
        "difficulties": script_args.eval_difficulties,
        "tasks": hashlib.sha256("\n".join(dataset["task_id"]).encode()).hexdigest()[:16],
        "root": str(check_root(script_args.appworld_root)),
        "prompt": str(script_args.prompt),
        "prompt_sha256": hashlib.sha256(template.template.encode()).hexdigest()[:16],
        "observation_template": script_args.observation_template,
        "samples": script_args.eval_samples,
        **{
            name: getattr(training_args, name)
            for name in ("bf16", "repetition_penalty", "chat_template_kwargs", "use_vllm")
        },
        "dtype": str(model_args.dtype),
        "step_timeout_s": script_args.step_timeout_s,
        "seed": training_args.seed,
        "temperature": training_args.temperature,
        **{name: getattr(training_args, name) for name in ("top_p", "top_k", "min_p", *budgets)},
        "versions": {
            "gvpo_trl": __version__,
            "python": platform.python_version(),
            "appworld": VERSION,
            **{name: _version(name) for name in PACKAGES},
        },
        "processes": training_args.world_size,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class EvaluationFiles:
    """The files of one evaluation.

    Args:
        report: file of the report; the file of the attempts lies beside it.
        settings: what decides the figures; see `settings_of`.
        rank: index of this process, each of which writes a file of its own.
    """

    def __init__(self, report: Path, settings: Mapping[str, Any], rank: int = 0):
        self.report = report
        self.settings = json.loads(json.dumps(settings))
        self.rank = rank
        self._file: Any = None

    @property
    def attempts(self) -> Path:
        """The file of this process's attempts."""
        rank = f".rank{self.rank}" if self.rank else ""
        return self.report.with_name(f"{self.report.stem}{rank}.attempts.jsonl")

    def all_attempts(self) -> list[Path]:
        """Return the files of the attempts of all processes."""
        folder, stem = self.report.parent, self.report.stem
        return sorted([*folder.glob(f"{stem}.attempts.jsonl"), *folder.glob(f"{stem}.rank*.attempts.jsonl")])

    def difference(self) -> str | None:
        """Return what differs between these settings and those of the files that are there; `None` if nothing does."""
        for path in self.all_attempts():
            begun = next(iter(_lines(path)), {})
            if "settings" not in begun:
                return f"the first line of {path} is damaged"
            theirs = begun["settings"]
            names = [name for name in {**theirs, **self.settings} if name not in FREE]
            different = [name for name in names if theirs.get(name) != self.settings.get(name)]
            if different:
                return ", ".join(
                    f"{name} was {theirs.get(name)!r} and is {self.settings.get(name)!r}" for name in different
                )
        return None

    def outcomes(self) -> dict[int, Any]:
        """Return the outcomes of the attempts that are there, by number. Unfinished lines are left out."""
        from gvpo_trl.training.outcomes import Outcome

        names = {field.name for field in dataclasses.fields(Outcome)}
        found = {}
        for path in self.all_attempts():
            for line in _lines(path):
                if "attempt" in line and names <= line.keys():
                    found[line["attempt"]] = Outcome(**{name: line[name] for name in names})
        return found

    def append(self, number: int, trajectory: "Trajectory") -> None:
        """Write one attempt. What is written before stays readable after a kill or on a full disk."""
        from gvpo_trl.training.outcomes import outcome_of

        if self._file is None:
            self.attempts.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.attempts.open("a+b")
            self._file.seek(0, os.SEEK_END)
            if not self._file.tell():
                self._write({"settings": self.settings})
            else:
                self._file.write(b"\n")  # a killed call may have left an incomplete line
        self._write({"attempt": number, **dataclasses.asdict(outcome_of(trajectory))})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def choose_files(report_path: str | None, output_dir: str, settings: Mapping[str, Any], rank: int) -> EvaluationFiles:
    """Return the files to write to: those of the same evaluation where it was interrupted, else new ones.

    Args:
        report_path: the user's file, or `None` for the next free name in `output_dir`.
        output_dir: folder of the default files.
        settings: what decides the figures.
        rank: index of this process.

    Raises:
        ValueError: the user's file belongs to an evaluation with other settings that was not finished.
    """
    if report_path is not None:
        files = EvaluationFiles(Path(report_path), settings, rank)
        if files.report.exists():  # a finished evaluation is replaced, as any file that a user names
            for path in files.all_attempts() if rank == 0 else ():
                path.unlink()
            return files
        if different := files.difference():
            raise ValueError(
                f"{files.attempts} holds attempts of an evaluation with other settings ({different}); give another "
                "report_path, or delete that file."
            )
        return files
    number = 1
    while True:
        suffix = "" if number == 1 else f"-{number}"
        files = EvaluationFiles(Path(output_dir) / f"evaluation-{settings['split']}{suffix}.json", settings, rank)
        if not files.report.exists() and files.difference() is None:
            return files
        number += 1


def run(trainer: "GVPOTrainer", dataset: "Dataset", files: EvaluationFiles, samples: int) -> dict[str, Any]:
    """Make the attempts that are missing, and return the report.

    Raises:
        KeyboardInterrupt: the user interrupts; a line says how to go on.
    """
    from tqdm.auto import tqdm

    from gvpo_trl.evaluation import attempt_tasks
    from gvpo_trl.training.outcomes import figures, outcome_of, standard_errors

    total, done = len(dataset) * samples, files.outcomes()
    trainer.accelerator.wait_for_everyone()
    is_main = trainer.accelerator.is_main_process
    if done and is_main:
        print(f"going on with {len(done)} of {total} attempts from {files.attempts}", flush=True)
    so_far = list(done.values())
    bar = tqdm(total=total, initial=len(done), unit="attempt", disable=trainer.args.disable_tqdm or not is_main)

    def ended(number: int, trajectory: "Trajectory") -> None:
        files.append(number, trajectory)
        so_far.append(outcome_of(trajectory))
        bar.update(trainer.accelerator.num_processes)
        bar.set_postfix_str(f"TGC {figures(so_far)['tgc']:.1f} %", refresh=False)

    try:
        if len(done) < total:
            attempt_tasks(trainer, dataset, samples, done=done.keys(), ended=ended)
    except KeyboardInterrupt:
        if is_main:
            print(
                f"\n{len(files.outcomes())} of {total} attempts are kept; the same command makes the others.",
                flush=True,
            )
        raise
    finally:
        bar.close()
    trainer.accelerator.wait_for_everyone()
    outcomes = [outcome for _, outcome in sorted(files.outcomes().items())]
    settings = {("task_list" if name == "tasks" else name): value for name, value in files.settings.items()}
    errors = {**standard_errors(outcomes), "clustered_by": "scenario"}
    return {**settings, **figures(outcomes), "standard_errors": errors}
