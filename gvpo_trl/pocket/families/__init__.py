"""The scenario families of the pocket data, which are the kinds of its tasks.

Any interpreter can import this folder, because it uses the standard library alone. A family is a set of functions of
the values drawn for a task: they give its instruction, the records to create, the reference solution turn by turn,
turns that fail, endings that miss something, and the unit tests.

```python
from gvpo_trl.pocket.families import load_task

family, values = load_task("data/pocket", "1a2b3c4_1")
family.instruction(values), family.turns(values), family.slips(values), family.wrong_ends(values)
```
"""

import json
from pathlib import Path

from . import challenge, mail, notes, phone, spotify, todoist, venmo
from .base import CHALLENGE_SPLITS, NORMAL_SPLITS, Check, Family, Row, Slip, Values
from .plan import plan
from .vocabulary import PEOPLE, POOLS, Draw, Person, closed_sets, person, pool

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (notes, phone, venmo, todoist, spotify, mail, challenge)
    for family in module.FAMILIES
}

__all__ = [
    "CHALLENGE_SPLITS",
    "FAMILIES",
    "NORMAL_SPLITS",
    "PEOPLE",
    "POOLS",
    "Check",
    "Draw",
    "Family",
    "Person",
    "Row",
    "Slip",
    "Values",
    "closed_sets",
    "load_task",
    "person",
    "plan",
    "pool",
]


def load_task(root: str | Path, task_id: str) -> tuple[Family, Values]:
    """Read the family and the drawn values of a pocket task from a data root.

    Raises:
        FileNotFoundError: the root has no such task, or the task is not a pocket task.
    """
    path = Path(root) / "data" / "tasks" / task_id / "ground_truth" / "pocket.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    return FAMILIES[record["family"]], record["values"]
