"""Plans which tasks a pocket root holds.

Each split has scenarios of the families, a scenario has three tasks, and the values of a task are drawn from a seed.
"""

import hashlib
import random

from .base import Family, Values
from .vocabulary import Draw

SPLITS = ("train", "dev", "test_normal", "test_challenge")
SPLIT_POOLS = {"dev": ("dev",), "test_normal": ("test",), "test_challenge": ("test",)}
"""Value pools that each split draws from. The settings give those of `train`."""
VARIANTS = 3
"""Tasks of a scenario."""


def plan(settings: dict, families: dict[str, Family]) -> dict[str, list[tuple[str, Family, Values]]]:
    """List the tasks of each split as (task id, family, values), in their order.

    `settings` holds `seed`, `scenarios` (for each family, by split), `train_pools` and `families` (names). The values
    of a task depend only on the seed and on the task's split, family and number. More scenarios or families therefore
    leave a task as it is, unless its instruction was drawn twice in its split.
    """
    tasks: dict[str, list[tuple[str, Family, Values]]] = {}
    used: set[str] = set()
    for split in SPLITS:
        pools = SPLIT_POOLS.get(split, tuple(settings["train_pools"]))
        tasks[split], seen = [], set()
        for number in range(settings["scenarios"][split]):
            for name in settings["families"]:
                if split not in families[name].splits:
                    continue
                key = f"{settings['seed']}/{split}/{name}/{number}"
                scenario, rng = _scenario_id(key, used), random.Random(key)
                phrase = rng.randrange(len(families[name].phrases))
                for variant in range(1, VARIANTS + 1):
                    values = _fresh_values(families[name], rng, pools, phrase, seen)
                    tasks[split].append((f"{scenario}_{variant}", families[name], values))
    return tasks


def _scenario_id(key: str, used: set[str]) -> str:
    """Find seven characters that stand for this scenario and for no other scenario of the root."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    scenario = next(digest[start : start + 7] for start in range(50) if digest[start : start + 7] not in used)
    used.add(scenario)
    return scenario


def _fresh_values(family: Family, rng: random.Random, pools: tuple[str, ...], phrase: int, seen: set[str]) -> Values:
    """Draw values whose instruction no other task of the split has, where the pools allow that."""
    for _ in range(20):
        values = {**family.sample(Draw(rng, pools)), "phrase": phrase}
        if family.instruction(values) not in seen:
            break
    seen.add(family.instruction(values))
    return values
