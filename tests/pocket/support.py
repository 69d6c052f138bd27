"""Helpers of the pocket data's tests: reading a data root, and playing code through the real engine."""

import json
import sqlite3
import subprocess
from pathlib import Path

from gvpo_trl.pocket import families

WORKER = Path(__file__).with_name("pocket_worker.py")
SPLITS = ("train", "dev", "test_normal", "test_challenge")


def task_ids(root: Path, split: str) -> list[str]:
    return (root / "data" / "datasets" / f"{split}.txt").read_text().split()


def task_file(root: Path, task_id: str, name: str):
    return json.loads((root / "data" / "tasks" / task_id / name).read_text())


def users(root: Path, app: str) -> list[sqlite3.Row]:
    """All accounts of an app, with every column of the table."""
    database = sqlite3.connect(root / "data" / "base_dbs" / f"{app}.db")
    database.row_factory = sqlite3.Row
    rows = database.execute("SELECT * FROM users ORDER BY id").fetchall()
    database.close()
    return rows


def first_tasks(root: Path) -> dict[str, tuple[str, families.Values]]:
    """The id and the values of one task of each family."""
    found = {}
    for split in SPLITS:
        for task_id in task_ids(root, split):
            family, values = families.load_task(root, task_id)
            found.setdefault(family.name, (task_id, values))
    return found


def leaves(values) -> list[str]:
    """Every value inside a task's values, as text."""
    if isinstance(values, dict):
        return [leaf for key, value in values.items() if key != "phrase" for leaf in leaves(value)]
    return [leaf for value in values for leaf in leaves(value)] if isinstance(values, list) else [str(values)]


def run_plays(root: Path, venv: Path, plays: list[dict]) -> list[dict]:
    """What came of each play of `pocket_worker.py`; two processes share the work."""
    command = [venv / "bin" / "python", WORKER, root]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)
    ]
    for number, worker in enumerate(workers):
        worker.stdin.write(json.dumps(plays[number::2]))
        worker.stdin.close()
    records = [json.loads(line) for worker in workers for line in worker.stdout]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert len(records) == len(plays)
    return records
