"""A SQL agent with tools, in the shape of TRL's agent example. Only the trainer's class is GVPO's.

    python recipes/tools/sql_agent.py --model Qwen/Qwen3-0.6B

The agent answers questions about a small library. It can list the tables, look at a table's columns and run a query.
A query that SQLite refuses raises, so its turn is a failed step.
"""

import argparse
import sqlite3
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gvpo_trl import GVPOTrainer

ROWS = {
    "books": [("Emma", "Austen", 1815), ("Persuasion", "Austen", 1817), ("Walden", "Thoreau", 1854)],
    "loans": [("Emma", "Ada"), ("Walden", "Ada"), ("Emma", "Grace")],
}
QUESTIONS = {
    "How many books did Austen write? Answer with a number.": "2",
    "In which year did Walden appear? Answer with a number.": "1854",
    "How often was Emma lent? Answer with a number.": "2",
    "Who has borrowed Walden? Answer with a name.": "Ada",
}


def connect() -> sqlite3.Connection:
    """Return a fresh database in memory that nobody can write to."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE books (title TEXT, author TEXT, year INTEGER)")
    connection.execute("CREATE TABLE loans (title TEXT, reader TEXT)")
    connection.executemany("INSERT INTO books VALUES (?, ?, ?)", ROWS["books"])
    connection.executemany("INSERT INTO loans VALUES (?, ?)", ROWS["loans"])
    connection.execute("PRAGMA query_only = ON")
    return connection


DATABASE = connect()


def list_tables() -> str:
    """List the tables of the database."""
    return ", ".join(ROWS)


def describe(table: str) -> str:
    """Show the columns of a table.

    Args:
        table: Name of the table.
    """
    columns = DATABASE.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
    if not columns:
        raise ValueError(f"There is no table {table!r}.")
    return ", ".join(name for (name,) in columns)


def query(sql: str) -> str:
    """Run a query and return its rows.

    Args:
        sql: A SELECT statement of SQLite.
    """
    return str(DATABASE.execute(sql).fetchmany(20))


def correct_answer(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1.0 where the last message is the answer."""
    return [
        float(str(messages[-1]["content"]).strip().rstrip(".") == right)
        for messages, right in zip(completions, answer, strict=True)
    ]


def looked(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    """Return 0.1 where the agent got a result from a tool, and not an error."""
    return [
        0.1 * any(message["role"] == "tool" and "error" not in str(message["content"]) for message in messages)
        for messages in completions
    ]


def tasks() -> Dataset:
    """Return the questions as TRL's data set."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": question}], "answer": answer}
            for question, answer in QUESTIONS.items()
        ]
    )


def make_trainer(
    model: Any, args: GRPOConfig, trainer_class: type[GRPOTrainer] = GVPOTrainer, **options: Any
) -> GRPOTrainer:
    """Make the trainer of this script; `GRPOTrainer` works as well."""
    return trainer_class(
        model,
        reward_funcs=[correct_answer, looked],
        args=args,
        train_dataset=tasks(),
        tools=[list_tables, describe, query],
        **options,
    )


def main() -> None:
    """Train a model of the Hub."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--output_dir", default="runs/sql-agent")
    options = parser.parse_args()
    args = GRPOConfig(
        output_dir=options.output_dir,
        max_completion_length=1024,
        max_tool_calling_iterations=6,
        chat_template_kwargs={"enable_thinking": False},
    )
    make_trainer(options.model, args).train()


if __name__ == "__main__":
    main()
