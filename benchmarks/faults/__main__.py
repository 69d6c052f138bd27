"""Rollouts whose agents misbehave and whose machinery breaks: `python -m benchmarks.faults`.

Groups of trajectories go through `GVPOTrainer`'s own path, from the rollout to the shaped advantages, on the real
engine and pocket tasks. Scripts take the place of the model's samples. More than half of the agents misbehave, and the
machinery of each attempt breaks with the probability `--fault-rate`, at a time drawn from the seed. Each row is then
compared with the right result:

    lost            rows that are missing or raised, and rows that were retried or are unscorable although no fault had
                    hit them; faults that the log or the metrics do not report
    wrongly_shaped  rows in which other steps than the failed ones are marked, whose reward differs from the
                    undisturbed one, or with a token whose advantage breaks the method's four cases (0 in unscorable
                    rows)
    leftovers       processes, descriptors, threads and files at the end that were not there at the beginning
    late            steps that took more than 2 s beyond their deadline

At the end, hosts are killed until training stops, other hosts never become ready, and a trainer is killed: `endings`
counts what is wrong then. Every finding is printed on standard error, and makes the exit status 1.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import finish
from benchmarks.faults.endings import ENDINGS
from benchmarks.faults.run import inject, pick_tasks
from gvpo_trl.environments.appworld.setup import ensure_appworld, make_pocket


def main() -> int:
    options, started = _options(), time.monotonic()
    root = options.root
    if not (root / "data").is_dir():
        make_pocket(root, venv=ensure_appworld(options.venv))
    with tempfile.TemporaryDirectory(prefix="gvpo-faults-") as folder:
        (Path(folder) / "run").mkdir()
        run, findings = inject(
            root.resolve(),
            Path(folder) / "run",
            episodes=options.episodes,
            rate=options.fault_rate,
            seed=options.seed,
            max_episodes=options.max_episodes,
            isolation=options.isolation,
            venv=options.venv,
        )
        endings = []
        for name, ending in ENDINGS.items():
            place = Path(folder) / name
            place.mkdir()
            endings += [f"{name}: {line}" for line in ending(root, place, pick_tasks(root)[0], venv=options.venv)]
    wrong = {name: getattr(findings, name) for name in ("lost", "wrongly_shaped", "leftovers", "late")}
    wrong["endings"] = endings
    for name, lines in wrong.items():
        for line in lines:
            print(f"{name}: {line}", file=sys.stderr)
    injected = dict(sorted(run.misbehaved.items())) | dict(sorted(run.faults.injected.items()))
    counts = {name: len(lines) for name, lines in wrong.items()}
    result = {"benchmark": "faults", "episodes": options.episodes, "injected": injected} | counts
    finish(result | dict(run.totals) | {"seconds": time.monotonic() - started})
    return int(any(counts.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--episodes", type=int, default=1000, help="disturbed episodes; a multiple of a number from 4 to 8"
    )
    parser.add_argument("--fault-rate", type=float, default=0.1, help="probability that an attempt's machinery breaks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--root", type=Path, default="data/pocket", help="data root of the pocket tasks, made if missing"
    )
    parser.add_argument("--max-episodes", type=int, default=6, help="episodes that are open at a time")
    parser.add_argument("--isolation", choices=("split", "process"), default="split")
    parser.add_argument("--venv", type=Path, help="AppWorld's virtual environment, where it is not the default one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
