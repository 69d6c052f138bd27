"""Runs the quickstart: three commands of the package, then a report, a figure and a table.

    gvpo-trl evaluate --config recipes/quickstart/config.yaml --eval_split test_normal …   (before)
    gvpo-trl train    --config recipes/quickstart/config.yaml …
    gvpo-trl evaluate …                                                                    (after)

`make quickstart` ends with this script. Every phase leaves a file in the output folder, so a second run goes on where
the first one stopped.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELD_OUT = "test_normal"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code of the first command that fails, or 0."""
    options, overrides = parse(arguments)
    run = Quickstart(options, overrides)
    if options.force:
        run.forget()
    if not run.report_path.is_file():
        for phase in (run.warm_start, run.before, run.train, run.after):
            if status := phase():
                return status
        run.write_report()
    run.show()
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read our own options. The other arguments go to every command as overrides of the configuration."""
    parser = argparse.ArgumentParser(
        description="Train a small agent with GVPO and report. Any further --field VALUE goes to gvpo-trl.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and training (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml", help="default: %(default)s")
    parser.add_argument(
        "--model", type=Path, default=HERE / "model", help="the starting agent, which is made when it is missing"
    )
    parser.add_argument("--force", action="store_true", help="delete the output folder and run everything again")
    return parser.parse_known_args(arguments)


class Quickstart:
    """The phases of the quickstart. Each returns an exit code, and does nothing when its result is there.

    Args:
        options: our own options.
        overrides: further `--field VALUE` arguments for every command.
    """

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str]):
        self.options = options
        self.overrides = list(overrides)
        self.folder: Path = options.output
        self.report_path = self.folder / "report.json"
        self._seconds_path = self.folder / "seconds.json"

    def forget(self) -> None:
        """Remove what an earlier run left in the output folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def warm_start(self) -> int:
        """Make the starting agent when it is missing. The repository ships it."""
        if (self.options.model / "config.json").is_file():
            return 0
        script = [sys.executable, HERE / "warm_start.py", "--output", self.options.model]
        return self._timed("warm_start", lambda: subprocess.run(script, check=False).returncode)

    def before(self) -> int:
        """Evaluate the starting agent on held-out tasks."""
        return self._evaluate("before", self.options.model)

    def train(self) -> int:
        """Train, and resume from the last checkpoint where there is one."""
        from transformers.trainer_utils import get_last_checkpoint

        if (self.folder / "model.safetensors").is_file():
            return 0
        argv = ["train", *self._common(), "--model_name_or_path", str(self.options.model)]
        if self.folder.is_dir() and get_last_checkpoint(str(self.folder)):
            argv += ["--resume_from_checkpoint", "true"]
        return self._timed("train", lambda: command(argv))

    def after(self) -> int:
        """Evaluate the trained agent on the same tasks, with the same seed."""
        return self._evaluate("after", self.folder)

    def write_report(self) -> None:
        """Write the report and the figure."""
        from transformers.trainer_utils import get_last_checkpoint

        from gvpo_trl.reporting.plots import plot_run

        keys = ("tgc", "sgc", "reward", "failed_step_share", "docs_step_share", "turns_per_task", "tasks", "attempts")
        results = {name: read_json(self.folder / f"{name}.json") for name in ("before", "after")}
        state = read_json(Path(get_last_checkpoint(str(self.folder))) / "trainer_state.json")
        history = state["log_history"]
        ends = [(0, results["before"]["tgc"]), (state["global_step"], results["after"]["tgc"])]
        plot_run(history, self.folder / "figure.png", title="GVPO quickstart", held_out=ends)
        report = {
            **{name: {key: result[key] for key in keys} for name, result in results.items()},
            "training": training_figures(history),
            "seconds": read_json(self._seconds_path),
            "peak_memory_mb": read_json(self.folder / "memory.json"),
            "seed": self.options.seed,
            "split": HELD_OUT,
        }
        write_json(self.report_path, report)

    def show(self) -> None:
        """Print the closing table."""
        from rich.console import Console

        report = read_json(self.report_path)
        console = Console()
        console.print(table(report))
        console.print(f"report: {self.report_path}   figure: {self.folder / 'figure.png'}")
        console.print("Look next at:", style="bold")
        console.print(f"  gvpo-trl view {self.folder}            what the agent wrote, step by step")
        console.print("  recipes/quickstart/config.yaml          try --shaping none (plain GRPO) or another --seed")
        console.print("  recipes/qwen2.5-7b-lora/                the same command for a real model and official data")

    def _evaluate(self, name: str, model: Path) -> int:
        path = self.folder / f"{name}.json"
        if path.is_file():
            return 0
        argv = ["evaluate", *self._common(), "--model_name_or_path", str(model)]
        argv += ["--eval_split", HELD_OUT, "--report_path", str(path), "--eval_strategy", "no"]
        return self._timed(f"evaluate_{name}", lambda: command(argv))

    def _common(self) -> list[str]:
        options = self.options
        own = ["--config", str(options.config), "--output_dir", str(self.folder), "--seed", str(options.seed)]
        return own + self.overrides

    def _timed(self, phase: str, work) -> int:
        """Run a phase and add its seconds to those of earlier, interrupted runs."""
        print(f"==> {phase.replace('_', ' ')}", flush=True)
        seconds = read_json(self._seconds_path) if self._seconds_path.is_file() else install_seconds()
        started = time.monotonic()
        status = work()
        seconds[phase] = round(seconds.get(phase, 0.0) + time.monotonic() - started, 1)
        write_json(self._seconds_path, seconds)
        write_json(self.folder / "memory.json", peak_memory())
        return status


def command(argv: list[str]) -> int:
    """Run one command of the package in this process, with the arguments of its command line."""
    from gvpo_trl.cli.main import main as gvpo_trl

    print("gvpo-trl " + " ".join(argv), flush=True)
    return gvpo_trl(argv)


def install_seconds() -> dict[str, float]:
    """Read the seconds of the phases before this script from the file that the Makefile names."""
    path = os.environ.get("GVPO_INSTALL_SECONDS")
    return read_json(Path(path)) if path and Path(path).is_file() else {}


def peak_memory() -> dict[str, int]:
    """Return the peak resident memory in MB of this process and of the largest process below it."""
    scale = 1024 * 1024 if sys.platform == "darwin" else 1024
    who = {"trainer": resource.RUSAGE_SELF, "largest_child": resource.RUSAGE_CHILDREN}
    return {name: resource.getrusage(number).ru_maxrss // scale for name, number in who.items()}


def training_figures(history: list[dict]) -> dict[str, float]:
    """Average over the training what the method did to groups and tokens."""
    groups, tokens = ("zero_variance", "zero_variance_with_gradient"), ("failed_tie", "failed_negative")
    figures = {}
    for name in [*(f"groups/{case}" for case in groups), *(f"tokens/{case}" for case in tokens)]:
        values = [entry[name] for entry in history if name in entry]
        figures[name] = round(sum(values) / len(values), 4) if values else float("nan")
    return figures


def table(report: dict):
    """Make a table with the figures before and after side by side."""
    from rich.table import Table

    rows = (
        ("task goal completion, %", "tgc", "{:.1f}"),
        ("scenario goal completion, %", "sgc", "{:.1f}"),
        ("reward (share of passed tests)", "reward", "{:.3f}"),
        ("share of failed steps", "failed_step_share", "{:.3f}"),
        ("share of steps that look into the docs", "docs_step_share", "{:.3f}"),
        ("turns a task", "turns_per_task", "{:.2f}"),
    )
    seconds = sum(report["seconds"].values())
    title = f"{report['split']}: {report['before']['tasks']} held-out tasks, {seconds:.0f} s in all"
    result = Table("", "before", "after", title=title, title_justify="left")
    for label, key, form in rows:
        result.add_row(label, form.format(report["before"][key]), form.format(report["after"][key]))
    return result


def read_json(path: Path) -> dict:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # The environment's processes use the other cores.
    sys.exit(main())
