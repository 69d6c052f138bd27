"""Questions about SQLite databases that a program makes: episodes that run SQL, and tasks as a dataset.

The trainer's process runs `client.py` and `tasks.py`; the rollout calls them. Worker processes, which `client.py`
starts, run `worker.py` and `engine.py`. All modules import the standard library, `environments.base`, `failures`,
`faults`, `text` and `sandbox`; `datasets` is imported where a dataset is made.

The engine is SQLite, which ships with Python. It needs no further dependency. Its authorizer refuses a statement by
what the statement does, its progress handler counts the operations of a query, so that the same query always gets the
same verdict, and its limits bound each value and the heap. DuckDB has no authorizer and no count of operations: its
limits are in seconds, which differ from run to run, and its external access is switched off by settings.

The contract between an agent and the environment:

- **Action.** The code of a turn is a fenced block with the label `sql` or `sqlite`. Its statements run in order, and
  the first error ends the step.
- **Observation.** Each statement shows its column names and at most `max_rows` rows.
- **Answer.** A statement that calls `answer(...)`, with one argument for each value that the question asks for, ends
  the episode if the step executes: `SELECT answer(name, weight) FROM ships WHERE id = 12`. Two different answers in
  one step are an error, and no answer is taken.
- **Verdict.** `SYNTAX`: the parser refused the text. `RUNTIME`: any other error of SQLite, such as an unknown column.
  `TIMEOUT`: the step used up its operations or its time. `MEMORY`: a value or the query became too large.
  `FORBIDDEN`: the step would write, attach, set a pragma or call a function that is not allowed. `NO_CODE`: the block
  holds no statement.
- **Score.** There is one requirement for each value of the answer. `rewards.passed_tests_share` gives the share of
  right values, `rewards.task_goal_completion` the binary reward.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gvpo_trl.environments.sql.client import SqlEnvironments
    from gvpo_trl.environments.sql.tasks import load_tasks

__all__ = ["SqlEnvironments", "load_tasks"]


def __getattr__(name: str) -> object:
    if name == "SqlEnvironments":
        from gvpo_trl.environments.sql.client import SqlEnvironments

        return SqlEnvironments
    if name == "load_tasks":
        from gvpo_trl.environments.sql.tasks import load_tasks

        return load_tasks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
