"""Plays the code of pocket tasks through the real engine, one world after another, in AppWorld's interpreter.

Standard input holds one JSON list of plays, each {"tag": …, "task": id, "turns": [code, …], "experiment": name}. A
play without turns runs the compiled solution that the task holds, as AppWorld's own verification does. The script
writes one line of JSON for each play: the play, the texts of its turns, the tests that pass after the last turn and,
for a play whose tag is "solution", those that pass before the first one.
"""

import json
import os
import sys

from appworld import AppWorld, update_root


def tests_of(world: AppWorld) -> dict:
    tests = world.evaluate()
    labels = sorted(item["label"] for item in tests.passes)
    return {"passed": tests.pass_count, "total": tests.num_tests, "labels": labels}


def main() -> None:
    update_root(sys.argv[1])
    for play in json.load(sys.stdin):
        mode = "minimal" if play["turns"] else "full"
        with AppWorld(play["task"], experiment_name=play["experiment"], ground_truth_mode=mode) as world:
            solution = f"{world.task.ground_truth.compiled_solution_code}\nsolution(apis, requester)"
            before = tests_of(world) if play["tag"] == "solution" else None
            texts = [world.execute(code) for code in play["turns"] or [solution]]
            after, completed = tests_of(world), world.task_completed()
        record = {**play, "texts": texts, "before": before, "after": after, "completed": completed}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # After many worlds an ordinary exit takes the interpreter minutes.
