"""Scripted experts for SQL with sloppy habits: they know the queries of every task, and still make mistakes."""

import random
import re
from dataclasses import dataclass

from gvpo_trl.environments.sql.databases import LIST_TABLES, Task
from gvpo_trl.environments.sql.words import POOLS

GIVE_UP = "SELECT answer(0)"
"""What an expert types after its script."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of an expert's mistakes. The defaults give a start that GVPO can improve."""

    slip: float = 0.35
    """Probability that a query is first written in a way that fails."""
    slip_again: float = 0.2
    """Probability that another slip follows a slip before the query is right."""
    skip_schema: float = 0.3
    """Probability that the expert first tries its luck without a look at the columns."""
    wrong_end: float = 0.3
    """Probability that the last query answers with something else."""


def script(task: Task, habits: Habits, rng: random.Random) -> list[str]:
    """Write the query of each turn of one attempt. Only the last one answers."""
    queries = []
    for query in task.queries:
        is_look_up = "sqlite_master" not in query
        chance = habits.slip
        if query.startswith("SELECT sql") and rng.random() < habits.skip_schema:
            queries.append(guessed_columns(task.queries[task.queries.index(query) + 1], rng))
        while rng.random() < chance:
            slip = rng.choice((broken, renamed) if is_look_up else (broken,))
            queries.append(slip(query, rng))
            chance = habits.slip_again
        queries.append(query)
    if rng.random() < habits.wrong_end:
        queries[-1] = wrong_end(task, rng)
    return [query for query in queries if query]


def broken(query: str, rng: random.Random) -> str:
    """Mistype a query so that it does not parse."""
    slips = [query.replace(" FROM ", " FORM ", 1)]
    if "answer(" in query:
        slips.append(query.replace(") FROM ", " FROM ", 1))
    if query.endswith("'"):
        slips.append(query[:-1])
    return rng.choice(slips)


def renamed(query: str, rng: random.Random) -> str:
    """Write a table or a column under a name that it does not have."""
    if rng.random() < 0.5:
        noun = next(noun for noun in POOLS["warm"].nouns if noun in re.search(r"FROM (\w+)", query)[1])
        other = rng.choice([name for name in (noun, f"{noun}s", f"t_{noun}") if f" {name} " not in query])
        return re.sub(r"FROM \w+", f"FROM {other}", query)
    return guessed_columns(query, rng)


def guessed_columns(query: str, rng: random.Random) -> str:
    """Write the column of the condition as it is called in many other databases; `""` if it is called so here too."""
    column = re.search(r"WHERE (\w+)", query)[1]
    words = POOLS["warm"]
    options = next(
        (group for group in (words.name_columns, words.group_columns, words.id_columns) if column in group), ("id",)
    )
    others = [name for name in options if name != column]
    return query.replace(f"WHERE {column}", f"WHERE {rng.choice(others)}") if others else ""


def wrong_end(task: Task, rng: random.Random) -> str:
    """Answer with something that is in the database, and is not what was asked for."""
    last = task.queries[-1]
    inner = re.search(r"answer\((.*)\) FROM", last)[1]
    numbers = {
        name for table in task.tables if f" {table.name} " in last for name, kind in table.columns if kind == "INTEGER"
    }
    column = re.search(r"(\w+)\)*$", inner)[1]
    options = [last.replace(column, other, 1) for other in sorted(numbers - {column})]
    options += [last.replace("SUM(", wrong, 1) for wrong in ("COUNT(", "MAX(") if "SUM(" in last]
    options.append(re.sub(r" AND .*", "", last) if " AND " in last else f"{LIST_TABLES} WHERE answer(0)")
    return rng.choice(options)
