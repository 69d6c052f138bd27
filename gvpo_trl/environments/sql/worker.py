"""The program of a worker process: it runs the SQL of episodes, one step after another.

`client.py` starts it with `python -m`, and is the only one that talks to it. Each message is one line of JSON. A
worker keeps the databases of some tasks open, and nothing else of an episode: a step needs only the task's id and the
code. It gives up files, processes and sockets before the first step (`gvpo_trl.sandbox`), and it dies with the process
that started it.
"""

import json
import os
import sys
from collections import OrderedDict

from gvpo_trl import sandbox
from gvpo_trl.environments.sql.databases import build
from gvpo_trl.environments.sql.engine import Database, Limits, limit_heap
from gvpo_trl.environments.sql.tasks import load_task
from gvpo_trl.failures import FailureKind

KEPT_DATABASES = 32
ADDRESS_SPACE = 256_000_000
"""Bytes of address space that a worker has beside SQLite's heap."""


def main() -> None:
    """Answer the requests on the standard input until it is closed."""
    limits = Limits(**json.loads(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    limit_heap(limits.memory_bytes)
    _rehearse(limits)
    sandbox.restrict(
        keep_fds=(requests.fileno(), answers),
        read_only=(),
        memory_bytes=ADDRESS_SPACE + limits.memory_bytes,
        parent=int(sys.argv[2]),
    )
    databases: OrderedDict[str, Database] = OrderedDict()
    _send(answers, {"ready": True})
    for line in requests:
        request = json.loads(line)
        task_id = request["task_id"]
        database = databases.pop(task_id, None) or Database(load_task(task_id).tables, limits)
        result = database.run(request["code"])
        if result.failure in (FailureKind.MEMORY, FailureKind.TIMEOUT):
            database.close()  # The next step begins with a fresh connection.
        else:
            databases[task_id] = database
        while len(databases) > KEPT_DATABASES:
            databases.popitem(last=False)[1].close()
        answer = {"text": result.text, "failure": result.failure, "answer": result.answer}
        _send(answers, answer | {"read_schema": result.read_schema})


def _rehearse(limits: Limits) -> None:
    """Run a few steps, so that every module is imported before files are out of reach."""
    database = Database(build("train", 1, 0, 1).tables, limits)
    for code in ("SELECT name FROM sqlite_master", "SELEC", "SELECT answer(1)", "SELECT CAST(x'ff' AS TEXT), x'00'"):
        json.loads(json.dumps(database.run(code).text).encode())
    database.close()


def _send(descriptor: int, message: dict) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
