"""The tasks of the SQL environment: their ids, and their prompts as a dataset for TRL."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gvpo_trl.environments.sql.databases import DIFFICULTIES, SHAPES, Task, build
from gvpo_trl.faults import SetupError

if TYPE_CHECKING:
    from datasets import Dataset

VARIANTS = 3
"""Questions about each database."""
MAX_NUMBER = 99_999
SYSTEM = (
    "Answer a question from a SQLite database. "
    "In each turn, write one block that begins with ```sql and ends with ```, and you see the rows of its query. "
    "The database is read-only. "
    "The names of its tables and columns differ from task to task, so look them up in sqlite_master first. "
    "When you know the answer, call answer() in a SELECT, with one argument for each value that is asked for, "
    "as in SELECT answer('Ann', age) FROM people WHERE id = 7. "
    "The first such query ends the task."
)
"""The system message."""
_TASK_ID = re.compile(r"sql/(\w+)/([0-9])/([0-9]{1,5})_([0-9])")


@functools.lru_cache(maxsize=4096)
def load_task(task_id: str) -> Task:
    """Make the task of an id such as `"sql/train/2/17_3"`: split, difficulty, database and question.

    Raises:
        SetupError: there is no such task.
    """
    match = _TASK_ID.fullmatch(task_id) if isinstance(task_id, str) else None
    split, difficulty, number, variant = match.groups() if match else ("", "0", "0", "0")
    canonical = f"sql/{split}/{int(difficulty)}/{int(number)}_{int(variant)}"
    if split not in SHAPES or int(difficulty) not in DIFFICULTIES or not 1 <= int(variant) <= VARIANTS:
        raise SetupError(
            f"task_id={task_id!r} is unknown; an id is sql/SPLIT/DIFFICULTY/DATABASE_QUESTION, with a split of "
            f"{', '.join(SHAPES)}, a difficulty from 1 to 3, and a question from 1 to {VARIANTS}"
        )
    if canonical != task_id:
        raise SetupError(f"task_id={task_id!r} is unknown; did you mean {canonical!r}?")
    return build(split, int(difficulty), int(number), int(variant))


def load_tasks(
    split_or_ids: str | Iterable[str],
    difficulties: Sequence[int] | None = None,
    count: int = 90,
    system: str = SYSTEM,
) -> "Dataset":
    """Make tasks with their prompts.

    Args:
        split_or_ids: `"train"`, `"dev"`, `"test"`, `"warm"` (words and shapes of all splits, for a warm start), or
            task ids.
        difficulties: the difficulties from 1 to 3; all of them by default.
        count: the number of tasks of each difficulty. Three consecutive tasks ask about one database. More tasks never
            change the first ones.
        system: the system message.

    Returns:
        A `datasets.Dataset` with the columns `prompt`, `task_id`, `scenario` (the database), `difficulty`,
        `instruction` (the question) and `split` (`None` for ids).

    Raises:
        SetupError: the split, a difficulty or an id is unknown, or `count` is out of range.
    """
    split = split_or_ids if isinstance(split_or_ids, str) else None
    ids = list(split_or_ids) if split is None else _ids(split, difficulties or DIFFICULTIES, count)
    if not ids:
        raise SetupError("the list of task ids is empty; name at least one")
    from datasets import Dataset

    return Dataset.from_list([_row(task_id, split, system) for task_id in ids])


def _ids(split: str, difficulties: Sequence[int], count: int) -> list[str]:
    if split not in SHAPES:
        raise SetupError(f"split {split!r} is unknown; there are {', '.join(SHAPES)}")
    unknown = sorted(set(difficulties) - set(DIFFICULTIES))
    if unknown:
        raise SetupError(f"difficulty {unknown[0]} is unknown; there are 1, 2 and 3")
    if not 1 <= count <= VARIANTS * MAX_NUMBER:
        raise SetupError(f"count={count} must be from 1 to {VARIANTS * MAX_NUMBER}")
    return [
        f"sql/{split}/{difficulty}/{place // VARIANTS}_{place % VARIANTS + 1}"
        for difficulty in difficulties
        for place in range(count)
    ]


def _row(task_id: str, split: str | None, system: str) -> dict[str, Any]:
    task = load_task(task_id)
    return {
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": task.question}],
        "task_id": task_id,
        "scenario": task_id.rsplit("_", 1)[0],
        "difficulty": int(task_id.split("/")[2]),
        "instruction": task.question,
        "split": split,
    }
