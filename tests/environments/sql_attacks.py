"""Hostile SQL with the verdict that each must get, and beside each a harmless query of the same form that executes."""

from dataclasses import dataclass

from gvpo_trl.failures import FailureKind

COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {limit})"
LONG = "replace('" + "a" * 90 + "', 'a', '" + "b" * 100 + "')"
"""An expression whose value has 9,000 characters."""


@dataclass(frozen=True)
class Attack:
    sql: str
    failure: FailureKind
    control: str
    also: tuple[FailureKind, ...] = ()
    """Verdicts of other releases of SQLite, which counts operations in the parser from 3.41 on."""


def _cross(count: int) -> str:
    tables = ", ".join(f"{{table}} AS t{number}" for number in range(count))
    return f"SELECT count(*) FROM {tables}"


def _doubling(depth: int) -> str:
    """Return a query whose parse tree doubles with each common table expression."""
    steps = [f"a{n} AS (SELECT p.x FROM a{n - 1} AS p, a{n - 1} AS q)" for n in range(1, depth)]
    return f"WITH a0 AS (SELECT 1 AS x), {', '.join(steps)} SELECT count(*) FROM a{depth - 1}"


TIME = {
    "a cartesian product": Attack(_cross(8), FailureKind.TIMEOUT, _cross(2)),
    "an endless recursion": Attack(
        COUNT.format(limit=-1) + " SELECT count(*) FROM c",
        FailureKind.TIMEOUT,
        COUNT.format(limit=100) + " SELECT count(*) FROM c",
    ),
    "a recursion that shows few rows": Attack(
        COUNT.format(limit=-1) + " SELECT x FROM c WHERE x < 0",
        FailureKind.TIMEOUT,
        COUNT.format(limit=100) + " SELECT x FROM c WHERE x < 0",
    ),
    "many long statements": Attack(
        ";".join([COUNT.format(limit=90_000) + " SELECT count(*) FROM c"] * 8),
        FailureKind.TIMEOUT,
        ";".join([COUNT.format(limit=90) + " SELECT count(*) FROM c"] * 8),
    ),
}
MEMORY = {
    "long values in a sorter": Attack(
        COUNT.format(limit=5000) + f" SELECT count(*) FROM (SELECT {LONG} || x AS y FROM c ORDER BY y LIMIT 4000)",
        FailureKind.MEMORY,
        COUNT.format(limit=50) + " SELECT count(*) FROM (SELECT 'b' || x AS y FROM c ORDER BY y LIMIT 40)",
    ),
    "long values in a queue": Attack(
        f"WITH RECURSIVE c(x, y) AS (SELECT 1, '' UNION SELECT x + 1, {LONG} || x FROM c) SELECT count(*) FROM c",
        FailureKind.MEMORY,
        "WITH RECURSIVE c(x, y) AS (SELECT 1, '' UNION SELECT x + 1, 'b' || x FROM c LIMIT 9) SELECT count(*) FROM c",
    ),
    "a value that doubles": Attack(f"SELECT hex({LONG})", FailureKind.MEMORY, f"SELECT length({LONG})"),
    "a text that grows by replacement": Attack(
        f"SELECT replace({LONG}, 'b', 'bbbb')", FailureKind.MEMORY, "SELECT replace('b', 'b', 'bbbb')"
    ),
    "a group that is joined": Attack(
        COUNT.format(limit=50_000) + " SELECT group_concat(x) FROM c",
        FailureKind.MEMORY,
        COUNT.format(limit=50) + " SELECT group_concat(x) FROM c",
    ),
    "a parse tree that doubles": Attack(
        _doubling(40), FailureKind.MEMORY, _doubling(3), also=(FailureKind.TIMEOUT, FailureKind.RUNTIME)
    ),
    "a long text": Attack("SELECT 1 /* " + "x" * 20_000 + " */", FailureKind.MEMORY, "SELECT 1 /* x */"),
}
READ = "SELECT count(*) FROM {table}"
FORBIDDEN = {
    sql: Attack(sql, FailureKind.FORBIDDEN, READ)
    for sql in (
        "ATTACH 'x.db' AS x",
        "DETACH main",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x (y)",
        "CREATE TEMP VIEW x AS SELECT 1",
        "CREATE VIRTUAL TABLE x USING fts5(y)",
        "DROP TABLE {table}",
        "DELETE FROM {table}",
        "UPDATE {table} SET {column} = 1",
        "INSERT INTO {table} DEFAULT VALUES",
        "ALTER TABLE {table} RENAME TO x",
        "VACUUM",
        "VACUUM INTO 'x.db'",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "COMMIT",
        "SAVEPOINT x",
        "PRAGMA writable_schema = 1",
        "PRAGMA query_only = 0",
        "PRAGMA hard_heap_limit = 0",
        "PRAGMA temp_store_directory = '/tmp'",
        "PRAGMA journal_mode = DELETE",
        "SELECT * FROM sqlite_temp_master",
        "SELECT * FROM dbstat",
        "SELECT count(*) FROM dbstat",
        "SELECT * FROM sqlite_stmt",
        "SELECT * FROM json_each('[1]')",
        "SELECT * FROM pragma_database_list",
    )
} | {
    f"SELECT {call}": Attack(f"SELECT {call}", FailureKind.FORBIDDEN, "SELECT upper('x')")
    for call in (
        "load_extension('x')",
        "fts3_tokenizer('x')",
        "zeroblob(1000000000)",
        "randomblob(9)",
        "random()",
        "printf('%.*c', 1000000000, 'a')",
        "printf('%1000000000d', 1)",
        "date('now')",
        "current_timestamp",
        "sqlite_compileoption_get(1)",
    )
}
ATTACKS = TIME | MEMORY | FORBIDDEN
