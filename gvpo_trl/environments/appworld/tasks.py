"""AppWorld's tasks as a dataset for TRL. This module reads `specs.json` and `metadata.json`, and never the answers."""

import difflib
import json
import os
import re
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gvpo_trl.environments.base import TaskSource
from gvpo_trl.faults import SetupError

if TYPE_CHECKING:
    from datasets import Dataset

DB_VERSION = "0.1.0"
"""Version of the databases that the pinned AppWorld reads."""
PROMPTS = Path(__file__).with_name("prompts")
"""Holds the named prompts, one text file each."""
POCKET_MARKER = "pocket.json"
"""File that `gvpo-trl appworld pocket` writes into a root, and into the ground truth of each of its tasks."""
PLACEHOLDERS = ("first_name", "last_name", "email", "phone_number", "instruction")
"""Names that a prompt's template can refer to."""
USER_TEMPLATE = (
    "My name is $first_name $last_name. My email is $email and my phone number is $phone_number.\n\nTask: $instruction"
)
_REMEDY = (
    "`gvpo-trl appworld pocket --root DIR` makes a small one, `appworld download data` fetches the official one; "
    "then pass root=DIR or set APPWORLD_ROOT"
)


def check_root(root: Path | str | None = None) -> Path:
    """Check that AppWorld can work with a data root, and return its absolute path.

    Args:
        root: the folder that holds `data/`; `APPWORLD_ROOT` or the current folder when `None`.

    Raises:
        SetupError: the root holds no data, data of another version, or AppWorld cannot read its path.
    """
    path = Path(root or os.environ.get("APPWORLD_ROOT") or ".").expanduser().resolve()
    missing = [name for name in ("datasets", "tasks", "base_dbs", "api_docs") if not (path / "data" / name).is_dir()]
    if missing:
        raise SetupError(f"root={str(path)!r} has no AppWorld data (data/{missing[0]} is missing); {_REMEDY}")
    if "memory" in str(path):
        raise SetupError(
            f"root={str(path)!r} contains 'memory', which AppWorld takes for a database in memory; move the data"
        )
    tasks = task_folders(path)
    if not tasks:
        raise SetupError(f"root={str(path)!r} has no tasks (data/tasks is empty); {_REMEDY}")
    version = _read_json(tasks[0] / "specs.json").get("db_version")
    if version != DB_VERSION:
        raise SetupError(
            f"root={str(path)!r} has data of db_version {version!r}, the supported AppWorld reads {DB_VERSION!r}; "
            f"{_REMEDY}"
        )
    return path


def task_folders(root: Path) -> list[Path]:
    """Return the folders of a data root's tasks, in the order of their names."""
    return sorted(entry for entry in (root / "data" / "tasks").iterdir() if entry.is_dir())


def task_source(root: Path) -> TaskSource:
    """Return what is known about the tasks of a data root: the pocket data, or AppWorld's own, which stay private.

    The pocket data has a marker in its root and one in each task, so a root that also holds other tasks counts as
    AppWorld's.
    """
    marked = all((folder / "ground_truth" / POCKET_MARKER).is_file() for folder in task_folders(root))
    if not (marked and (root / POCKET_MARKER).is_file()):
        return TaskSource(
            name="AppWorld", slug="appworld", description="AppWorld asks not to publish its tasks.", is_appworld=True
        )
    settings = _read_json(root / POCKET_MARKER)
    return TaskSource(
        name="gvpo-trl's pocket data",
        slug="appworld-pocket",
        description=(
            "The pocket data is not AppWorld's benchmark: `gvpo-trl appworld pocket` writes small tasks of its own "
            f"for AppWorld's apps, made by program from {len(settings['families'])} families with seed "
            f"{settings['seed']} (format {settings['format']}). Figures on it do not compare with figures on AppWorld."
        ),
        is_publishable=True,
        is_appworld=True,
    )


def matching_prompt(system_text: str) -> tuple[str, str] | None:
    """Return name and template of the named prompt that a system text was made from; `None` if there is none."""
    for path in sorted(PROMPTS.glob("*.txt")):
        template = path.read_text().strip()
        pattern = re.escape(template)
        for name in PLACEHOLDERS:
            pattern = pattern.replace(re.escape(f"${name}"), "[^\\n]+")
        if re.fullmatch(pattern, system_text):
            return path.stem, template
    return None


def check_task(root: Path, task_id: str) -> None:
    """Raise a `SetupError` that names the most similar tasks when there is no such task."""
    plain = isinstance(task_id, str) and task_id and Path(task_id).name == task_id
    if plain and (root / "data" / "tasks" / task_id / "specs.json").is_file():
        return
    known = [entry.name for entry in task_folders(root)]
    raise SetupError(f"task_id={task_id!r} is unknown in {str(root)!r}{_nearest(str(task_id), known)}")


def load_tasks(
    split_or_ids: str | Iterable[str],
    difficulties: Sequence[int] | None = None,
    root: Path | str | None = None,
    prompt: str | Path = "react",
) -> "Dataset":
    """Load tasks with their prompts.

    Args:
        split_or_ids: a split (`"train"`, `"dev"`, `"test_normal"`, `"test_challenge"`) or task ids.
        difficulties: keep these difficulties (1 to 3) only.
        root: AppWorld's data root; `APPWORLD_ROOT` or the current folder by default.
        prompt: the system text: `"react"` (with a worked example), `"compact"` (three sentences, for tiny models) or
            the path of a template of your own. A template may hold `$first_name`, `$last_name`, `$email`,
            `$phone_number` and `$instruction`; `$$` stands for a dollar sign.

    Returns:
        A `datasets.Dataset` with the columns `prompt` (system and user message), `task_id`, `scenario`, `difficulty`,
        `instruction`, `datetime` (of the task's world, ISO format) and `split` (`None` for ids).

    Raises:
        SetupError: the split or a task is unknown, no task is left, the root holds no data, or the template is broken.
    """
    path = check_root(root)
    template = load_prompt(prompt)
    split = split_or_ids if isinstance(split_or_ids, str) else None
    ids = _split_ids(path, split) if split is not None else list(split_or_ids)
    for task_id in ids:
        check_task(path, task_id)
    rows = [_row(path, task_id, template, split) for task_id in ids]
    if difficulties is not None:
        rows = [row for row in rows if row["difficulty"] in set(difficulties)]
    if not rows:
        of = "" if difficulties is None else f" of difficulties {tuple(difficulties)}"
        raise SetupError(f"{split_or_ids!r} holds no tasks{of} in {str(path)!r}; choose another split or difficulty")
    from datasets import Dataset

    return Dataset.from_list(rows)


def load_prompt(prompt: str | Path) -> string.Template:
    """Return the system text of a named prompt or of a file, after a check of its placeholders.

    Raises:
        SetupError: there is no such prompt, or it has a placeholder that nothing fills.
    """
    path = PROMPTS / f"{prompt}.txt" if (PROMPTS / f"{prompt}.txt").is_file() else Path(prompt)
    if not path.is_file():
        names = sorted(entry.stem for entry in PROMPTS.glob("*.txt"))
        raise SetupError(f"prompt={str(prompt)!r} is neither one of {names} nor a file; choose one or write it")
    template = string.Template(path.read_text().strip())
    if not template.is_valid():
        raise SetupError(f"prompt={str(prompt)!r} holds a lone '$'; write '$$' for a dollar sign")
    unknown = [name for name in template.get_identifiers() if name not in PLACEHOLDERS]
    if unknown:
        allowed = ", ".join(f"${name}" for name in PLACEHOLDERS)
        raise SetupError(f"prompt={str(prompt)!r} holds ${unknown[0]}, which nothing fills; allowed are {allowed}")
    return template


def _row(root: Path, task_id: str, template: string.Template, split: str | None) -> dict[str, Any]:
    folder = root / "data" / "tasks" / task_id
    specs = _read_json(folder / "specs.json")
    if specs.get("db_version") != DB_VERSION:
        version = specs.get("db_version")
        raise SetupError(f"task_id={task_id!r} is of db_version {version!r}, the supported one is {DB_VERSION!r}")
    values = {name: specs["supervisor"][name] for name in PLACEHOLDERS[:-1]} | {"instruction": specs["instruction"]}
    metadata = folder / "ground_truth" / "metadata.json"
    return {
        "prompt": [
            {"role": "system", "content": template.substitute(values)},
            {"role": "user", "content": string.Template(USER_TEMPLATE).substitute(values)},
        ],
        "task_id": task_id,
        "scenario": task_id.split("_")[0],
        # The official test splits come without ground truth.
        "difficulty": _read_json(metadata)["difficulty"] if metadata.is_file() else None,
        "instruction": specs["instruction"],
        "datetime": specs.get("datetime"),
        "split": split,
    }


def _split_ids(root: Path, split: str) -> list[str]:
    path = root / "data" / "datasets" / f"{split}.txt"
    if not path.is_file() or Path(split).name != split:
        known = sorted(entry.stem for entry in path.parent.glob("*.txt"))
        raise SetupError(f"split {split!r} is unknown; there are {known}; a single task is passed as a list of one id")
    # AppWorld allows a tag after the id, behind a colon.
    return [line.split(":")[0].strip() for line in path.read_text().splitlines() if line.strip()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{str(path)!r} cannot be read ({error}); the data root is damaged, make it again") from error


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
    return f"; the nearest are {', '.join(nearest)}" if nearest else ""
