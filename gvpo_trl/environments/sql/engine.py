r"""Runs the SQL of an agent on one database, within limits, and says how it failed.

Five layers keep a hostile query in its place. The database is in memory, and the connection only reads it. An
authorizer allows reading the task's tables and a list of functions, and nothing else. SQLite's own limits bound the
length of each value and the size of a statement. A progress handler counts the operations of a step and ends it at a
fixed number, so the verdict does not depend on the machine's load. `limit_heap` bounds the memory of the process. What
runs between two operations, such as the parser, is not counted: the process that holds the engine is restricted
and has a deadline as well (`worker.py`, `client.py`).
"""

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gvpo_trl.environments.sql.databases import Table
from gvpo_trl.failures import FailureKind
from gvpo_trl.text import printable_line

FUNCTIONS = frozenset(
    {
        "answer",
        *("char", "coalesce", "concat", "concat_ws", "glob", "hex", "ifnull", "iif"),
        *("instr", "length", "like", "lower", "ltrim", "nullif", "quote", "replace"),
        *("rtrim", "substr", "substring", "trim", "typeof", "unicode", "upper"),
        *("abs", "ceil", "ceiling", "floor", "mod", "power", "round", "sign"),
        *("sqrt",),
        *("avg", "count", "group_concat", "max", "min", "string_agg", "sum", "total"),
        *("cume_dist", "dense_rank", "first_value", "lag", "last_value", "lead", "nth_value", "ntile"),
        *("percent_rank", "rank", "row_number"),
    }
)
"""Functions that a query may call. Those of chance and of the clock are missing: the same query gives the same rows.

`printf` and `format` are missing as well: a width of a billion keeps them busy for seconds, and no limit of SQLite
ends a single call.
"""
PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "foreign_key_list"})
CATALOGUE = frozenset({"sqlite_master", "sqlite_schema"})
MAX_STATEMENTS = 8
MAX_VALUES = 16
"""Arguments of a function, so also the values of an answer."""
OPERATIONS_BETWEEN_LOOKS = 100
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 64,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 16,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 20_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: MAX_VALUES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 64,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_PARSER_MESSAGE = re.compile(r'near ".*": syntax error|unrecognized token: ".*"|incomplete input', re.DOTALL)
_SQLITE_NOMEM, _SQLITE_INTERRUPT, _SQLITE_TOOBIG = 7, 9, 18
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*+'?|"(?:[^"]|"")*+"?|`(?:[^`]|``)*+`?|\[[^\]]*+\]?)"""
    r"""|(?P<comment>--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?)|(?P<end>;)|(?P<space>\s++)|[^'"`\[;\s/-]++|."""
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a step may use and show."""

    operations: int = 2_000_000
    """Operations of SQLite's virtual machine in a step: about a tenth of a second."""
    seconds: float = 5.0
    """Wall time of a step, for a busy machine and for functions that are slow on long values."""
    rows: int = 8
    """Rows that a statement shows."""
    cell: int = 200
    """Characters that a value shows."""
    characters: int = 2000
    """Characters that a step shows."""
    memory_bytes: int = 32_000_000
    """Heap of SQLite in the process; `limit_heap` puts it in force."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a step."""

    text: str
    failure: FailureKind | None = None
    answer: tuple[int | float | str | None, ...] | None = None
    """The values of the answer that the step gave; `None` if it gave none."""
    read_schema: bool = False
    """Whether the step read names of tables or columns."""


class Stopped(Exception):
    """A step that ends with a verdict of ours rather than SQLite's."""

    def __init__(self, failure: FailureKind, message: str):
        super().__init__(message)
        self.failure = failure


class Database:
    """One task's database, opened for reading.

    Args:
        tables: the tables with their rows.
        limits: what a step may use.
    """

    def __init__(self, tables: Iterable[Table], limits: Limits):
        self._limits = limits
        # A statement that is prepared anew is authorized anew, so none is kept.
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        self._connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        self._tables = {table.name for table in tables}
        for setting in ("page_size=1024", "temp_store=MEMORY", "trusted_schema=OFF", "cell_size_check=ON"):
            self._connection.execute(f"PRAGMA {setting}")
        for table in tables:
            self._connection.execute(table.ddl)
            marks = ", ".join("?" * len(table.columns))
            self._connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
        for pragma in PRAGMAS:  # The first use of a table-valued pragma defines it, which the authorizer would refuse.
            self._connection.execute(f"SELECT * FROM pragma_{pragma}('x')").fetchall()
        self._connection.execute("PRAGMA query_only=ON")
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.create_function("answer", -1, self._answer)
        self._connection.set_authorizer(self._authorize)
        self._connection.set_progress_handler(self._look, OPERATIONS_BETWEEN_LOOKS)
        self._begin()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def run(self, code: str) -> Result:
        """Run the statements of a step one after another; the first error ends the step."""
        self._begin()
        shown: list[str] = []
        failure = None
        try:
            statements = split_statements(code)
            if not statements:
                raise Stopped(FailureKind.NO_CODE, "The block holds no SQL statement.")
            if len(statements) > MAX_STATEMENTS:
                message = f"{len(statements)} statements; a block may hold {MAX_STATEMENTS}"
                raise Stopped(FailureKind.FORBIDDEN, message)
            for statement in statements:
                shown += self._run_statement(statement)
        except Stopped as stopped:
            failure = stopped.failure
            shown.append(f"Error: {printable_line(str(stopped))[: self._limits.cell]}")
        answer = None if failure else self._given
        if answer is not None:
            shown.append("Your answer was taken.")
        return Result(text="\n".join(shown), failure=failure, answer=answer, read_schema=self._read_schema)

    def _begin(self) -> None:
        self._looks, self._out_of_time = 0, False
        self._deadline = time.monotonic() + self._limits.seconds
        self._room = self._limits.characters
        self._refused: str | None = None
        self._problem: str | None = None
        self._given: tuple | None = None
        self._read_schema = False

    def _run_statement(self, statement: str) -> list[str]:
        """Run a statement and return the lines that it shows, which are cut while they are produced.

        Raises:
            Stopped: the statement failed.
        """
        try:
            with contextlib.closing(self._connection.execute(statement)) as cursor:
                if cursor.description is None:  # REINDEX, for one, is authorized where there is no index.
                    raise Stopped(FailureKind.FORBIDDEN, "only queries are allowed")
                return list(self._lines(cursor))
        except MemoryError as error:
            raise Stopped(FailureKind.MEMORY, "out of memory") from error
        except sqlite3.DataError as error:  # SQLite's limit on a value, or Python's on a statement.
            raise Stopped(FailureKind.MEMORY, str(error)) from error
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: the text holds a null character.
            raise self._verdict(error) from error

    def _lines(self, cursor: sqlite3.Cursor) -> Iterator[str]:
        limits = self._limits
        yield from self._fitting(" | ".join(self._cell(column[0]) for column in cursor.description))
        count = 0
        for row in cursor:
            count += 1
            if count > limits.rows or self._room <= 0:
                yield f"[more rows than {count - 1} are not shown]"
                return
            yield from self._fitting(" | ".join(self._cell(value) for value in row))
        if count == 0:
            yield "[no rows]"

    def _fitting(self, line: str) -> Iterator[str]:
        """Yield as much of a line as there is room for."""
        if self._room > 0:
            yield line if len(line) <= self._room else line[: self._room] + "…"
        self._room -= len(line) + 1

    def _cell(self, value: object) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, bytes):
            text = f"x'{value[: self._limits.cell // 2 + 1].hex()}'"
        else:
            text = value if isinstance(value, str) else repr(value)
        cut = text[: self._limits.cell]
        return printable_line(cut) + ("…" if len(cut) < len(text) else "")

    def _verdict(self, error: Exception) -> Stopped:
        code = getattr(error, "sqlite_errorcode", None)
        message = str(error)
        if self._refused:
            return Stopped(FailureKind.FORBIDDEN, self._refused)
        if self._problem:
            return Stopped(FailureKind.RUNTIME, self._problem)
        if self._out_of_time or code == _SQLITE_INTERRUPT:
            return Stopped(FailureKind.TIMEOUT, "the step takes too long")
        if code in (_SQLITE_NOMEM, _SQLITE_TOOBIG):
            return Stopped(FailureKind.MEMORY, message)
        is_syntax = _PARSER_MESSAGE.fullmatch(message) is not None
        return Stopped(FailureKind.SYNTAX if is_syntax else FailureKind.RUNTIME, message)

    # SQLite calls the following methods while it prepares or runs a statement.

    def _authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            is_catalogue = first in CATALOGUE or first.removeprefix("pragma_") in PRAGMAS
            self._read_schema |= is_catalogue
            # A common table expression of which no column is read has a name but no column.
            if is_catalogue or first in self._tables or not second:
                return sqlite3.SQLITE_OK
            return self._refuse(f"table {first} must not be read")
        if action == sqlite3.SQLITE_FUNCTION:
            return (
                sqlite3.SQLITE_OK if second.lower() in FUNCTIONS else self._refuse(f"function {second} is not allowed")
            )
        if action == sqlite3.SQLITE_PRAGMA:
            if first.lower() in PRAGMAS:
                self._read_schema = True
                return sqlite3.SQLITE_OK
            return self._refuse(f"pragma {first} is not allowed")
        return self._refuse("the database is read-only")

    def _refuse(self, reason: str) -> int:
        self._refused = self._refused or reason
        return sqlite3.SQLITE_DENY

    def _look(self) -> bool:
        self._looks += 1
        used = self._looks * OPERATIONS_BETWEEN_LOOKS
        self._out_of_time = used > self._limits.operations or time.monotonic() > self._deadline
        return self._out_of_time

    def _answer(self, *values: int | float | str | bytes | None) -> str:
        if not values or any(isinstance(value, bytes) for value in values):
            self._problem = "answer() takes one number or text for each value that is asked for"
        elif self._given not in (None, values):
            self._problem = "answer() was called with two different answers in one step"
        if self._problem:
            raise ValueError(self._problem)
        self._given = values
        return "taken"


def limit_heap(limit_bytes: int) -> None:
    """Limit the heap of SQLite in this process, for good: the limit holds for all connections and is never raised."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA hard_heap_limit={limit_bytes}")


def split_statements(code: str) -> list[str]:
    """Split a script at its semicolons. Statements that hold nothing but comments are left out."""
    statements, start, has_content = [], 0, False
    for token in _TOKEN.finditer(code):
        if token.lastgroup == "end":
            if has_content:
                statements.append(code[start : token.start()].strip())
            start, has_content = token.end(), False
        elif token.lastgroup not in ("comment", "space"):
            has_content = True
    if has_content:
        statements.append(code[start:].strip())
    return statements


def is_right(given: object, expected: int | str) -> bool:
    """Whether a value of an answer is right. A number may be given as a text that spells it."""
    if isinstance(expected, str):
        return isinstance(given, str) and given.strip() == expected
    if isinstance(given, str):
        try:
            given = float(given) if len(given) < 40 else None
        except ValueError:
            return False
    return isinstance(given, int | float) and given == expected


def right_values(given: Sequence[object] | None, expected: Sequence[int | str]) -> list[bool]:
    """Return for each expected value whether it was given in its place. With too many values, none is right."""
    if given is None or len(given) > len(expected):
        return [False] * len(expected)
    padded = [*given, *[None] * (len(expected) - len(given))]
    return [is_right(value, wanted) for value, wanted in zip(padded, expected, strict=True)]
