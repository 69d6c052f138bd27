"""Run by AppWorld's interpreter: plays the code of pocket tasks through the real engine, one world after another.

Standard input holds one JSON list of plays, each {"task": id, "turns": [code, …], "tag": anything}. For each play, one
line of JSON goes out: its tag, the texts of its turns, the tests that pass before the first turn and after the last.
"""

import json
import os
import sys

from appworld import AppWorld, update_root


def tests_of(world: AppWorld) -> dict:
    tests = world.evaluate()
    return {
        "passed": tests.pass_count,
        "total": tests.num_tests,
        "labels": sorted(item["label"] for item in tests.passes),
    }


def main() -> None:
    update_root(sys.argv[1])
    for number, item in enumerate(json.load(sys.stdin)):
        with AppWorld(task_id=item["task"], experiment_name=f"play_{os.getpid()}_{number}") as world:
            before = tests_of(world)
            texts = [world.execute(code) for code in item["turns"]]
            after = tests_of(world)
            completed = world.task_completed()
        record = {"tag": item["tag"], "task": item["task"], "texts": texts, "completed": completed}
        print(json.dumps({**record, "before": before, "after": after}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # after many worlds the interpreter spins for minutes on its way out
