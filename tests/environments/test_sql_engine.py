"""The engine that runs an agent's SQL: hostile queries with their controls, verdicts, and what a step shows."""

import json
import os
import subprocess
import sys

import pytest

from gvpo_trl.environments.sql.databases import build
from gvpo_trl.environments.sql.engine import Database, Limits, is_right, right_values, split_statements
from gvpo_trl.failures import FailureKind
from tests.environments.sql_attacks import ATTACKS, COUNT, FORBIDDEN, LONG, MEMORY, TIME

TASK = build("train", 1, 0, 1)
TABLE = TASK.tables[0]


def filled(sql: str) -> str:
    return sql.replace("{table}", TABLE.name).replace("{column}", TABLE.columns[0][0])


def content(database: Database) -> list[str]:
    """Return all rows of all tables, and the names of all tables."""
    names = [f"SELECT count(*), group_concat({t.columns[0][0]}), '{t.name}' FROM {t.name}" for t in TASK.tables]
    return [database.run(query).text for query in [*names, "SELECT group_concat(name) FROM sqlite_master"]]


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - MEMORY.keys()))
def test_an_attack_gets_its_verdict_and_its_control_executes(name):
    """The attack changes nothing: the same connection still answers, and its tables are as before."""
    database = Database(TASK.tables, Limits())
    before = content(database)
    attack = ATTACKS[name]
    result = database.run(filled(attack.sql))
    assert result.failure is attack.failure, result.text
    assert len(result.text) < 3000
    assert content(database) == before
    assert database.run(filled(attack.control)).failure is None
    database.close()


@pytest.mark.parametrize("name", TIME)
def test_the_time_is_counted_in_operations(name):
    """With more operations the same query goes on, so the limit is what stops it; the clock has no part in it."""
    few = Database(TASK.tables, Limits(operations=2000, seconds=1e6))
    assert few.run(filled(TIME[name].sql)).failure is FailureKind.TIMEOUT
    count = COUNT.format(limit=3000) + " SELECT count(*) FROM c"
    assert few.run(count).failure is FailureKind.TIMEOUT
    assert Database(TASK.tables, Limits(seconds=1e6)).run(count).failure is None


def test_the_clock_stops_a_query_too():
    database = Database(TASK.tables, Limits(operations=10**12, seconds=0.05))
    assert database.run(TIME["an endless recursion"].sql).failure is FailureKind.TIMEOUT


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_plain_connection_would_not_refuse(name, tmp_path, monkeypatch):
    """The control of the authorizer: most forbidden statements work on a connection without it."""
    import sqlite3

    monkeypatch.chdir(tmp_path)
    plain = sqlite3.connect(":memory:", isolation_level=None)
    for table in TASK.tables:
        plain.execute(table.ddl)
    refused = ("DETACH", "COMMIT", "load_extension", "fts3_tokenizer", "dbstat", "sqlite_stmt", "1000000000", "INTO")
    if not any(word in name for word in refused):
        plain.execute(filled(FORBIDDEN[name].sql)).fetchmany(1)


VERDICTS = {
    "SELEC 1": FailureKind.SYNTAX,
    "SELECT 1 FROM": FailureKind.SYNTAX,
    "SELECT 'a": FailureKind.SYNTAX,
    "SELECT (1": FailureKind.SYNTAX,
    "SELECT x": FailureKind.RUNTIME,
    "SELECT \"near 'x': syntax error\".y": FailureKind.RUNTIME,
    "SELECT * FROM missing": FailureKind.RUNTIME,
    "SELECT missing(1)": FailureKind.RUNTIME,
    "SELECT abs(-9223372036854775808)": FailureKind.RUNTIME,
    "SELECT 'a\0b'": FailureKind.RUNTIME,
    "SELECT '\ud800'": FailureKind.RUNTIME,
    "SELECT answer()": FailureKind.RUNTIME,
    "SELECT answer(x'00')": FailureKind.RUNTIME,
    "": FailureKind.NO_CODE,
    " ; -- nothing\n/* ; */ ;": FailureKind.NO_CODE,
    "SELECT 'Error: near \"x\": syntax error'": None,
    "SELECT 1;": None,
    "VALUES (1)": None,
    "EXPLAIN SELECT 1": None,
    "PRAGMA table_info(sqlite_master)": None,
    "SELECT name FROM pragma_table_info('sqlite_master')": None,
    "SELECT row_number() OVER () FROM sqlite_master": None,
}


@pytest.mark.parametrize("sql", VERDICTS)
def test_verdicts(sql):
    assert Database(TASK.tables, Limits()).run(sql).failure is VERDICTS[sql]


def test_the_first_error_ends_the_step_and_takes_no_answer():
    database = Database(TASK.tables, Limits())
    result = database.run("SELECT 1 AS one; SELECT answer(2); SELECT missing; SELECT 3 AS three")
    assert result.failure is FailureKind.RUNTIME and result.answer is None
    assert result.text.startswith("one\n1\n") and "three" not in result.text
    assert database.run("SELECT answer(2), answer(2)").answer == (2,)
    assert database.run("SELECT answer(1) UNION ALL SELECT answer(2)").failure is FailureKind.RUNTIME
    assert database.run("SELECT 1").answer is None, "an answer belongs to one step"


def test_rows_are_bounded_while_they_are_produced():
    """The rows that are not shown are not computed: this query never ends."""
    database = Database(TASK.tables, Limits(rows=3))
    result = database.run(COUNT.format(limit=-1) + " SELECT x FROM c")
    assert (result.text, result.failure) == ("x\n1\n2\n3\n[more rows than 3 are not shown]", None)
    assert database.run("SELECT 1 AS x WHERE 0").text == "x\n[no rows]"


def test_characters_are_bounded():
    database = Database(TASK.tables, Limits(cell=10, characters=60))
    assert database.run("SELECT 'aaaaaaaaaaaa' AS x").text == "x\naaaaaaaaaa…"
    assert len(database.run(f"SELECT {', '.join(['1234567890'] * 40)}").text) < 200
    assert len(database.run(";".join([f"SELECT {LONG}"] * 8)).text) < 600


def test_text_is_spelled_out():
    database = Database(TASK.tables, Limits())
    result = database.run(
        "SELECT char(27) || '[2J' AS a, char(10) AS b, CAST(x'ff' AS TEXT) AS c, x'00ff' AS d, NULL AS e"
    )
    assert result.text == "a | b | c | d | e\n\\x1b[2J | \\n | \\xff | x'00ff' | NULL"
    assert database.run("SELECT 1.5 AS a, 9e999 AS b").text == "a | b\n1.5 | inf"


def test_reading_the_schema_is_noticed():
    database = Database(TASK.tables, Limits())
    for sql in ("SELECT sql FROM sqlite_master", "PRAGMA table_list", "SELECT * FROM pragma_table_info('x')"):
        assert database.run(sql).read_schema
    assert not database.run(f"SELECT * FROM {TABLE.name}").read_schema


@pytest.mark.parametrize(
    ("code", "statements"),
    [
        ("SELECT 1; SELECT 2", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';' , \"a;b\", [c;d], `e;f`", ["SELECT ';' , \"a;b\", [c;d], `e;f`"]),
        ("SELECT 'it''s; here'; SELECT 2 -- ; no\n", ["SELECT 'it''s; here'", "SELECT 2 -- ; no"]),
        ("/* ; */ SELECT 1 - 2 / 3", ["/* ; */ SELECT 1 - 2 / 3"]),
        ("SELECT 'open ; text", ["SELECT 'open ; text"]),
        ("SELECT /* open ;", ["SELECT /* open ;"]),
    ],
)
def test_statements_are_split_as_sqlite_reads_them(code, statements):
    assert split_statements(code) == statements


def test_right_values():
    assert is_right(364, 364) and is_right(364.0, 364) and is_right(" 364 ", 364)
    assert not any(is_right(value, 364) for value in (363, None, "x", "nan", "", (364,), "3" * 50))
    assert is_right("Nova ", "Nova") and not is_right("nova", "Nova") and not is_right(1, "1")
    assert right_values(["Nova", 3], ["Nova", 4]) == [True, False]
    assert right_values([3], ["Nova", 4]) == [False, False]
    assert right_values(["Nova", 4, 5], ["Nova", 4]) == [False, False], "more values than were asked for"
    assert right_values(None, ["Nova"]) == [False]


def test_a_worker_gives_up_files_and_processes():
    """A worker whose engine lists a folder: the kernel refuses it. Without the restriction it works."""
    program = (
        "import os, sys\n"
        "from gvpo_trl.environments.sql import engine, worker\n"
        "def run(self, code):\n"
        "    try:\n"
        "        text = os.listdir('/')[0]\n"
        "    except OSError as error:\n"
        "        text = type(error).__name__\n"
        "    return engine.Result(text=text)\n"
        "original, engine.Database.run = engine.Database.run, run\n"
        "if sys.argv[3] == 'open':\n"
        "    worker.sandbox.restrict = lambda **_: None\n"
        "worker.main()\n"
    )
    texts = []
    for mode in ("closed", "open"):
        command = [sys.executable, "-c", program, "{}", str(os.getpid()), mode]
        request = json.dumps({"task_id": "sql/train/1/0_1", "code": "SELECT 1"}) + "\n"
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=60, check=False)
        texts.append(json.loads(done.stdout.splitlines()[1])["text"])
    from gvpo_trl import sandbox

    if sandbox.probe().level == "none":
        pytest.skip("this kernel restricts nothing")
    assert texts[0] in ("PermissionError", "FileNotFoundError")
    assert not texts[1].endswith("Error")
