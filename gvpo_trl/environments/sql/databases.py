"""Makes a database, a question about it and the queries that answer the question, all from a seed.

A question leads along a chain of tables. Each `Shape` names the steps of such a chain:

- `key`: a row holds the id of a row in another table;
- `name`: a row holds the name of a row in another table;
- `link`: a third table pairs the ids of two tables;
- `table`: a row holds the *name of the table* in which its record stands, which no join can follow;
- `self`: a row holds the id of another row of its table.

The last table either has a column for each measure, or (`long`) a row for each measure of a thing. A question asks for
values of the last row, or (`total`) for the sum over the rows of a group. `Task.queries` reads one table at a time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from gvpo_trl.environments.sql.words import NUMERIC, POOLS, TEXT, Words

VERSION = 1
"""Part of every seed. A change of what a seed gives must change it."""
ROWS = 12
"""Rows of a table, and things in a table with a row for each measure."""
DISTRACTORS = 3
"""Tables that no question needs. There are fewer where a database would have more than `MAX_TABLES` tables."""
MAX_TABLES = 8
"""Tables of a database. The list of them fits one observation."""
LIST_TABLES = "SELECT name FROM sqlite_master"
"""The query that begins every solution."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a question."""

    hops: tuple[str, ...] = ()
    long: bool = False
    total: bool = False


SHAPES: dict[str, dict[int, tuple[Shape, ...]]] = {
    "train": {
        1: (Shape(), Shape(total=True)),
        2: (Shape(("key",)), Shape(("name",))),
        3: (Shape(("key", "key")), Shape(("key", "name")), Shape(("link", "key"))),
    },
    "dev": {
        1: (Shape(long=True),),
        2: (Shape(("table",)),),
        3: (Shape(("name", "table")), Shape(("key", "link"))),
    },
    "test": {
        1: (Shape(("self",)), Shape(long=True, total=True)),
        2: (Shape(("key", "self")), Shape(("key",), long=True)),
        3: (Shape(("table", "key", "self")), Shape(("link", "table", "self")), Shape(("name", "key"), long=True)),
    },
}
"""The shapes of each split and difficulty. No shape is in two splits."""
SHAPES["warm"] = {
    difficulty: sum((SHAPES[split][difficulty] for split in ("train", "dev", "test")), ()) for difficulty in (1, 2, 3)
}
DIFFICULTIES = (1, 2, 3)


@dataclass(slots=True)
class Table:
    """A table with its rows."""

    name: str
    columns: list[tuple[str, str]]
    """Name and type of each column."""
    rows: list[tuple]

    @property
    def ddl(self) -> str:
        """The statement that creates the table."""
        return f"CREATE TABLE {self.name} ({', '.join(f'{name} {kind}' for name, kind in self.columns)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A database and a question about it."""

    tables: tuple[Table, ...] = field(repr=False)
    question: str
    parts: tuple[str, ...]
    """What each value of the answer is, in words."""
    answer: tuple[int | str, ...]
    queries: tuple[str, ...]
    """A solution whose queries depend on one another. The last one answers."""
    shape: Shape


@dataclass(slots=True)
class _Kind:
    """A kind of thing with its table: the names of the table's columns and its rows as dictionaries by role."""

    noun: str
    table: str
    columns: dict[str, str]
    """Column name by role: `id`, `name`, `group`, `next`, `hop` or a measure."""
    measures: list[str]
    rows: list[dict[str, int | str]]
    long: bool = False
    home: str = "name"
    """The role of the column by which the previous row finds its row here."""


def build(split: str, difficulty: int, number: int, variant: int) -> Task:
    """Make a task. Tasks that differ only in `variant` have the same database and ask about different rows.

    Args:
        split: a split of `SHAPES`.
        difficulty: 1 to 3.
        number: the number of the database in its split and difficulty.
        variant: the number of the question about it, from 1.
    """
    rng = random.Random(f"gvpo-sql-{VERSION}/{split}/{difficulty}/{number}")
    shapes = SHAPES[split][difficulty]
    maker = _Maker(POOLS[split], shapes[number % len(shapes)], rng)
    maker.make_tables()
    return maker.ask(variant)


class _Maker:
    """Makes the tables of one database, then its questions."""

    def __init__(self, words: Words, shape: Shape, rng: random.Random):
        self._words, self._shape, self._rng = words, shape, rng
        self._nouns = rng.sample(words.nouns, len(shape.hops) + 1 + DISTRACTORS)
        self._tables: list[Table] = []
        self._chain: list[_Kind] = []
        self._links: dict[int, tuple[Table, dict]] = {}
        self._shards: dict[int, dict[str, _Kind]] = {}
        """By place in the chain: the tables into which the kind at this place is divided, by their names."""

    def make_tables(self) -> None:
        """Make the tables of the chain, and those that no question needs."""
        hops = [hop for hop in self._shape.hops if hop != "self"]
        kinds = [self._kind(long=self._shape.long and place == len(hops)) for place in range(len(hops) + 1)]
        self._chain = kinds
        for place, hop in enumerate(hops):
            self._join(place, hop)
        if self._shape.hops[-1:] == ("self",):
            for kind in self._shards.get(len(hops), {"": kinds[-1]}).values():
                self._refer_to_itself(kind)
        for place, kind in enumerate(kinds):
            self._tables += [self._table(each) for each in self._shards.get(place, {"": kind}).values()]
        self._tables += [link for link, _ in self._links.values()]
        for number in range(min(DISTRACTORS, MAX_TABLES - len(self._tables))):
            spare = self._kind(long=False)
            if number == 0:  # A column that looks like a reference is no sign of the chain.
                spare.columns["hop"] = f"{kinds[0].noun}_{kinds[0].columns['id']}"
                for row in spare.rows:
                    row["hop"] = self._rng.choice(kinds[0].rows)["id"]
            self._tables.append(self._table(spare))
        self._rng.shuffle(self._tables)

    def _kind(self, long: bool) -> _Kind:
        words, rng, noun = self._words, self._rng, self._nouns.pop()
        measures = rng.sample(words.measures, 2)
        columns = {
            "id": rng.choice(words.id_columns),
            "name": rng.choice(words.name_columns),
            "group": rng.choice(words.group_columns),
            **{measure: measure for measure in measures},
        }
        if long:
            columns["property"], columns["value"] = rng.choice(words.property_columns)
        table = rng.choice(words.affixes).replace("*", noun)
        return _Kind(noun, table, columns, measures, self._rows(measures), long)

    def _rows(self, measures: Sequence[str]) -> list[dict[str, int | str]]:
        rng = self._rng
        values = {measure: rng.sample(range(100, 1000), ROWS) for measure in measures}
        ids, names = rng.sample(range(10, 100), ROWS), rng.sample(self._words.names, ROWS)
        groups = self._words.groups[:3] if len(self._words.groups) < 4 else rng.sample(self._words.groups, 3)
        return [
            {"id": ids[place], "name": names[place], "group": groups[place % 3]}
            | {measure: values[measure][place] for measure in measures}
            for place in range(ROWS)
        ]

    def _join(self, place: int, hop: str) -> None:
        """Let each row of a kind refer to a row of the next kind."""
        here, there = self._chain[place], self._chain[place + 1]
        homes = self._shards.get(place, {"": here}).values()
        if hop == "link":
            self._link(place, here, there)
        elif hop == "table":
            self._divide(place, homes, there)
        else:
            role = {"key": "id", "name": "name"}[hop]
            there.home = role
            for kind in homes:
                kind.columns["hop"] = f"{there.noun}_{there.columns[role]}"
                for row, other in zip(kind.rows, self._rng.sample(there.rows, ROWS), strict=True):
                    row["hop"] = other[role]

    def _link(self, place: int, here: _Kind, there: _Kind) -> None:
        there.home = "id"
        columns = [f"{kind.noun}_{kind.columns['id']}" for kind in (here, there)]
        pairs = {
            row["id"]: other["id"] for row, other in zip(here.rows, self._rng.sample(there.rows, ROWS), strict=True)
        }
        rows = list(pairs.items())
        self._rng.shuffle(rows)
        link = Table(f"{here.noun}_{there.noun}", [(column, NUMERIC) for column in columns], rows)
        self._links[place] = link, pairs

    def _divide(self, place: int, homes: Sequence[_Kind], there: _Kind) -> None:
        """Divide the next kind into tables. Each of them has a record for every row, but only one is the row's own."""
        here = self._chain[place]
        there.home = "owner"
        there.columns["owner"] = f"{here.noun}_{here.columns['name']}"
        shards = {}
        for part in self._words.parts[:3] if len(self._words.parts) == 3 else self._rng.sample(self._words.parts, 3):
            rows = self._rows(there.measures)
            for row, owner in zip(rows, self._rng.sample(here.rows, ROWS), strict=True):
                row["owner"] = owner["name"]
            shards[there.table + part] = _Kind(
                there.noun, there.table + part, dict(there.columns), there.measures, rows, there.long, "owner"
            )
        self._shards[place + 1] = shards
        for kind in homes:
            kind.columns["hop"] = f"{there.noun}_table"
            for row in kind.rows:
                row["hop"] = self._rng.choice(list(shards))

    def _refer_to_itself(self, kind: _Kind) -> None:
        kind.columns["next"] = self._rng.choice(self._words.next_columns).replace("*", kind.columns["id"])
        order = self._rng.sample(kind.rows, ROWS)
        for row, other in zip(order, order[1:] + order[:1], strict=True):
            row["next"] = other["id"]

    def _table(self, kind: _Kind) -> Table:
        if kind.long:
            roles = [role for role in kind.columns if role not in kind.measures]
            pairs = [(row, measure) for row in kind.rows for measure in kind.measures]
            rows = [row | {"property": measure, "value": row[measure]} for row, measure in pairs]
        else:
            roles, rows = list(kind.columns), list(kind.rows)
        self._rng.shuffle(roles)
        self._rng.shuffle(rows)
        types = {role: NUMERIC if isinstance(rows[0][role], int) else TEXT for role in roles}
        columns = [(kind.columns[role], types[role]) for role in roles]
        return Table(kind.table, columns, [tuple(row[role] for role in roles) for row in rows])

    def ask(self, variant: int) -> Task:
        """Ask about a row, and solve the question."""
        first = self._chain[0]
        rows = self._rng.sample(first.rows, ROWS)
        measures = [self._rng.choice(kind.measures) for kind in self._chain * ROWS]
        question = _Question(self._chain, self._shards, self._links, self._shape)
        question.solve(rows[(variant - 1) % ROWS], measures[variant * len(self._chain) - 1])
        return Task(
            tables=tuple(self._tables),
            question=question.text,
            parts=tuple(question.parts),
            answer=tuple(question.answer),
            queries=tuple(question.queries),
            shape=self._shape,
        )


class _Question:
    """Follows the chain from a row, and notes the text of the question, the answer and the queries."""

    def __init__(
        self,
        chain: Sequence[_Kind],
        shards: dict[int, dict[str, _Kind]],
        links: dict[int, tuple[Table, dict]],
        shape: Shape,
    ):
        self._chain, self._shards, self._links, self._shape = chain, shards, links, shape
        self.queries = [LIST_TABLES]
        self.parts: list[str] = []
        self.answer: list[int | str] = []
        self.text = ""

    def solve(self, row: dict, measure: str) -> None:
        """Ask for a measure at the end of the chain that begins at a row."""
        kind = self._chain[0]
        if self._shape.total:
            self._solve_total(kind, row, measure)
            return
        phrase = f"the {kind.noun} {row['name']}"
        hops = [hop for hop in self._shape.hops if hop != "self"]
        known = ("name", row["name"])
        self._describe(kind.table)
        for place, hop in enumerate(hops):
            phrase = f"the {self._chain[place + 1].noun} of {phrase}"
            kind, row, known = self._follow(place, hop, kind, row, known)
            if place == 0 and len(hops) > 1:
                self._ask_for(f"the name of {phrase}", row["name"])
        if self._shape.hops[-1:] == ("self",):
            self.queries.append(self._select(kind, [kind.columns["next"]], *known))
            row = next(other for other in kind.rows if other["id"] == row["next"])
            known, phrase = ("id", row["id"]), f"the {kind.noun} that comes next after {phrase}"
        values = [_literal(value) for value in self.answer]
        if hops:
            self._ask_for(f"the name of {phrase}", row["name"])
            values.append(kind.columns["name"])
        self._ask_for(f"the {measure} of {phrase}", row[measure])
        values.append(kind.columns["value"] if kind.long else measure)
        self.queries.append(self._select(kind, [f"answer({', '.join(values)})"], *known, measure=measure))
        self.text = f"Find {', and '.join(self.parts)}."

    def _solve_total(self, kind: _Kind, row: dict, measure: str) -> None:
        column = kind.columns["value"] if kind.long else measure
        self._describe(kind.table)
        self.queries.append(self._select(kind, [f"answer(SUM({column}))"], "group", row["group"], measure=measure))
        self._ask_for(
            f"the total {measure} of each {kind.noun} in the group {row['group']}",
            sum(other[measure] for other in kind.rows if other["group"] == row["group"]),
        )
        self.text = f"Find {self.parts[0]}."

    def _follow(self, place: int, hop: str, kind: _Kind, row: dict, known: tuple) -> tuple[_Kind, dict, tuple]:
        """Take one hop, and return the kind and the row behind it, and by what the row can be found."""
        there = self._chain[place + 1]
        # The first name on the way is asked for, so it is read before its table is left.
        wanted = [kind.columns["name"]] if place == 1 else []
        if hop == "link":
            link, pairs = self._links[place]
            (ours, _), (theirs, _) = link.columns
            if known[0] != "id":
                wanted.append(kind.columns["id"])
            if wanted:
                self.queries.append(self._select(kind, wanted, *known))
            self._describe(link.name)
            self.queries.append(f"SELECT {theirs} FROM {link.name} WHERE {ours} = {row['id']}")
            found = pairs[row["id"]]
        else:
            self.queries.append(self._select(kind, [*wanted, kind.columns["hop"]], *known))
            found = row["hop"]
        if hop == "table":
            there, found = self._shards[place + 1][found], row["name"]
        self._describe(there.table)
        reached = next(other for other in there.rows if other[there.home] == found)
        return there, reached, (there.home, found)

    def _describe(self, table: str) -> None:
        self.queries.append(f"SELECT sql FROM sqlite_master WHERE name = '{table}'")

    def _ask_for(self, part: str, value: int | str) -> None:
        self.parts.append(part)
        self.answer.append(value)

    @staticmethod
    def _select(kind: _Kind, columns: Sequence[str], role: str, value: int | str, measure: str | None = None) -> str:
        query = f"SELECT {', '.join(columns)} FROM {kind.table} WHERE {kind.columns[role]} = {_literal(value)}"
        return f"{query} AND {kind.columns['property']} = '{measure}'" if kind.long and measure else query


def _literal(value: int | str) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
