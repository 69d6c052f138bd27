"""Measures the SQL environment, and GVPO on it: `python -m benchmarks.sql`.

The first half plays the scripted solutions of tasks of all splits and difficulties, one episode after another, with
this process and its one worker bound to a single core: it opens an episode, runs its queries and scores it. The second
half runs `recipes/sql`: an evaluation of the small agent, 20 optimizer steps of GVPO, and the same evaluation again.
The databases of the evaluations are none that training sees: those of `success` have its names and shapes, those of
`held_out_success` have others. No Hub and no other data are needed. The last line is JSON.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks.common import finish
from gvpo_trl.environments.sql import SqlEnvironments
from gvpo_trl.environments.sql.databases import DIFFICULTIES
from gvpo_trl.environments.sql.tasks import VARIANTS, load_task

SPLITS = ("train", "dev", "test")


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parse(arguments)
    started = time.perf_counter()
    result: dict[str, object] = {"benchmark": "sql", **measure_steps(options.databases, options.repeats)}
    if not options.steps_only:
        from recipes.sql.run import train

        with tempfile.TemporaryDirectory() as folder:
            report = train(["--output_dir", folder, *overrides])
        for name in ("before", "after"):
            result[f"success_{name}"] = report[name]["tgc"] / 100
            result[f"held_out_success_{name}"] = report[f"held_out_{name}"]["tgc"] / 100
            result[f"failed_step_share_{name}"] = report[name]["failed_step_share"]
        result |= {"optimizer_steps": report["steps"], "attempts": report["after"]["attempts"]}
        result["seconds_of"] = report["seconds"]
    result["seconds"] = time.perf_counter() - started
    finish(result)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Measure the SQL environment. Any further --field VALUE goes to recipes/sql.", allow_abbrev=False
    )
    parser.add_argument("--databases", type=int, default=20, help="databases of each split and difficulty")
    parser.add_argument("--repeats", type=int, default=3, help="plays of all tasks; the best one counts")
    parser.add_argument("--steps-only", action="store_true", help="train nothing")
    return parser.parse_known_args(arguments)


def measure_steps(databases: int, repeats: int) -> dict[str, float]:
    """Return steps and episodes per second on one core, on databases that the worker has not seen."""
    rates, steps, plays = [], 0, 0
    with one_core(), SqlEnvironments(max_episodes=1, workers=1) as environments:
        environments.start()
        for repeat in range(repeats):
            task_ids = [
                f"sql/{split}/{difficulty}/{repeat * databases + number}_{variant + 1}"
                for split in SPLITS
                for difficulty in DIFFICULTIES
                for number in range(databases)
                for variant in range(VARIANTS)
            ]
            started = time.perf_counter()
            steps, plays = sum(play(environments, task_id) for task_id in task_ids), len(task_ids)
            rates.append(steps / (time.perf_counter() - started))
    return {"steps_per_second": max(rates), "episodes_per_second": max(rates) * plays / steps}


def play(environments: SqlEnvironments, task_id: str) -> int:
    """Solve a task and return the number of its steps."""
    queries = load_task(task_id).queries
    episode = environments.open(task_id)
    try:
        for query in queries:
            episode.step(query)
        assert episode.score().success, task_id
    finally:
        episode.close()
    return len(queries)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Bind this thread, and the processes and threads that it starts, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
