"""Compares GVPO with the same training without shaping, over seeds, each arm with its own best learning rate.

    python -m benchmarks.shaping --seeds 5 --rates 2e-4 4e-4 --jobs 2

Both arms run `gvpo-trl train --config recipes/quickstart/config.yaml`. One of them has `--shaping none`, which is GRPO
without division by the standard deviation. Each arm takes the learning rate with the best TGC on `dev`, measured with
seeds that no reported run uses. The report gives figures on `test_normal`, with `--samples` attempts per task. A run
whose report exists is not repeated, so the command can be stopped and continued. The last line is JSON.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ARMS = {"gvpo": "multiplicative", "grpo_without_std": "none"}
FIGURES = ("tgc", "sgc", "reward", "failed_step_share", "docs_step_share", "turns_per_task")
SELECTION_SEEDS = 1000
"""Offset of the seeds that choose a learning rate, so that no reported run had a part in the choice."""


@dataclass(frozen=True)
class Run:
    """One training run and its evaluation."""

    arm: str
    rate: str
    seed: int
    split: str
    samples: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.arm}-lr{self.rate}-seed{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    options = parse(arguments)
    chosen = choose_rates(options) if len(options.rates) > 1 else dict.fromkeys(ARMS, options.rates[0])
    finals = {
        arm: [Run(arm, chosen[arm], seed, "test_normal", options.samples) for seed in range(options.seeds)]
        for arm in ARMS
    }
    reports = execute([run for pair in zip(*finals.values(), strict=True) for run in pair], options)
    print(json.dumps(summarize(finals, reports, chosen)))
    return 0


def choose_rates(options: argparse.Namespace) -> dict[str, str]:
    """Return the learning rate of each arm that has the best TGC on `dev`."""
    choices = {
        arm: {
            rate: [
                Run(arm, rate, SELECTION_SEEDS + seed, "dev", options.samples)
                for seed in range(options.selection_seeds)
            ]
            for rate in options.rates
        }
        for arm in ARMS
    }
    chosen = {}
    tried = execute([run for rates in choices.values() for runs in rates.values() for run in runs], options)
    for arm, rates in choices.items():
        on_dev = {rate: mean([tried[run]["tgc"] for run in runs]) for rate, runs in rates.items()}
        chosen[arm] = max(on_dev, key=on_dev.get)
        print(f"{arm}: TGC on dev by learning rate {on_dev}, chosen {chosen[arm]}", flush=True)
    return chosen


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options that it does not know go to every training and evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="reported runs of each arm (default: %(default)s)")
    parser.add_argument("--selection-seeds", type=int, default=1, help="runs per learning rate (default: %(default)s)")
    help_of_rates = "learning rates to choose from; a single one is taken as it is"
    parser.add_argument("--rates", nargs="+", default=["2e-4", "4e-4"], help=help_of_rates)
    parser.add_argument("--samples", type=int, default=4, help="attempts at each held-out task (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time (default: %(default)s)")
    parser.add_argument("--config", default="recipes/quickstart/config.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/shaping"))
    options, options.overrides = parser.parse_known_args(arguments)
    return options


def execute(runs: Sequence[Run], options: argparse.Namespace) -> dict[Run, dict[str, float]]:
    """Run each training and evaluation that has no report yet, several at a time."""
    with ThreadPoolExecutor(options.jobs) as pool:
        return dict(zip(runs, pool.map(lambda run: train_and_evaluate(run, options), runs), strict=True))


def train_and_evaluate(run: Run, options: argparse.Namespace) -> dict[str, float]:
    """Return the report of a run, which trains and evaluates if the report does not exist.

    Raises:
        SystemExit: a command failed; the message names its log.
    """
    folder = options.output / run.name
    report = folder / f"{run.split}-{run.samples}.json"
    if not report.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        common = ["--config", options.config, "--output_dir", str(folder), "--seed", str(run.seed), *options.overrides]
        train = ["train", *common, "--shaping", ARMS[run.arm], "--learning_rate", run.rate]
        train += ["--eval_strategy", "no", "--save_strategy", "no"]
        if not (folder / "model.safetensors").is_file():
            command(train, folder)
        evaluate = ["evaluate", *common, "--model_name_or_path", str(folder), "--log_trajectories", "false"]
        evaluate += ["--eval_split", run.split, "--eval_samples", str(run.samples), "--report_path", str(report)]
        command(evaluate, folder)
        print(f"{run.name}: {json.loads(report.read_text())}", file=sys.stderr, flush=True)
    return json.loads(report.read_text())


def command(arguments: Sequence[str], folder: Path) -> None:
    """Run one command of the package and append its output to the run's log."""
    log = folder / "log.txt"
    with log.open("a") as output:
        status = subprocess.run(
            [sys.executable, "-m", "gvpo_trl", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    if status:
        raise SystemExit(f"gvpo-trl {arguments[0]} failed with status {status}; see {log}")


def summarize(
    finals: dict[str, list[Run]], reports: dict[Run, dict[str, float]], chosen: dict[str, str]
) -> dict[str, dict]:
    """Return mean and standard error over the seeds, for each arm and for the difference of the arms seed by seed."""
    values = {
        arm: {figure: [reports[run][figure] for run in runs] for figure in FIGURES} for arm, runs in finals.items()
    }
    first, second = ARMS
    differences = {
        figure: [a - b for a, b in zip(values[first][figure], values[second][figure], strict=True)]
        for figure in FIGURES
    }
    return {
        **{
            arm: {"learning_rate": chosen[arm], **{figure: mean_and_error(values[arm][figure]) for figure in FIGURES}}
            for arm in ARMS
        },
        "difference": {figure: mean_and_error(each) for figure, each in differences.items()},
        "seeds": len(finals[first]),
    }


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, rounded to three decimal places."""
    return round(statistics.fmean(values), 3)


def mean_and_error(values: Sequence[float]) -> list[float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan")
    return [mean(values), round(error, 3)]


if __name__ == "__main__":
    sys.exit(main())
