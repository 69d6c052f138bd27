"""Trains the small SQL agent with GVPO, and evaluates it before and after.

One evaluation is of databases with the names and shapes of training that training does not see, the other of held-out
schemas.

    python -m recipes.sql.run
    python -m recipes.sql.run --seed 1 --output_dir runs/sql-1 --shaping none     # any field of the configuration

Run it from the root of the repository. The trained model and `report.json` are in `output_dir`.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gvpo_trl.cli.config import parse_config
from gvpo_trl.cli.run import build_trainer
from gvpo_trl.environments.sql import SqlEnvironments, load_tasks
from gvpo_trl.environments.sql.databases import DIFFICULTIES
from gvpo_trl.environments.sql.tasks import VARIANTS
from gvpo_trl.evaluation import evaluate

CONFIG = Path(__file__).with_name("config.yaml")
FIRST_UNSEEN = 50_000
"""Number of the first database of the training split that is kept for evaluation."""


def train(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate, train, evaluate again and save the model.

    Args:
        overrides: fields of the configuration as on a command line, such as `["--max_steps", "2"]`.

    Returns:
        `before` and `after` with the figures of `gvpo_trl.evaluation.evaluate` on unseen databases of the training
        split, `held_out_before` and `held_out_after` with those on `eval_split`, `seconds` by phase, and `steps`.
    """
    script_args, training_args, model_args = parse_config("train", ["--config", str(CONFIG), *overrides])
    train_tasks = load_tasks(
        script_args.train_split, script_args.difficulties, count=script_args.max_train_tasks or 96
    )
    eval_tasks = load_tasks(
        script_args.eval_split, script_args.eval_difficulties, count=script_args.max_eval_tasks or 90
    )
    unseen = load_tasks(
        [
            f"sql/{script_args.train_split}/{difficulty}/{FIRST_UNSEEN + place // VARIANTS}_{place % VARIANTS + 1}"
            for difficulty in script_args.difficulties or DIFFICULTIES
            for place in range(script_args.max_eval_tasks or 90)
        ]
    )
    report: dict[str, Any] = {"seconds": {}}
    with SqlEnvironments(script_args.max_episodes, step_timeout_s=script_args.step_timeout_s) as environments:
        environments.start()
        trainer = build_trainer(script_args, training_args, model_args, environments, train_dataset=train_tasks)

        def measure(name: str, work) -> Any:
            started = time.monotonic()
            result = work()
            report["seconds"][name] = round(time.monotonic() - started, 1)
            return result

        samples = script_args.eval_samples

        def evaluate_both(when: str) -> None:
            for name, tasks in (("", unseen), ("held_out_", eval_tasks)):
                report[name + when] = evaluate(trainer, tasks, samples=samples)

        measure("evaluate_before", lambda: evaluate_both("before"))
        measure("train", trainer.train)
        measure("evaluate_after", lambda: evaluate_both("after"))
        report["steps"] = trainer.state.global_step
        trainer.save_model(training_args.output_dir)
        trainer.end()
    (Path(training_args.output_dir) / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    report = train(sys.argv[1:] if arguments is None else arguments)
    for name in ("before", "after", "held_out_before", "held_out_after"):
        print(name, {key: round(value, 3) for key, value in report[name].items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
