"""Plays episodes on AppWorld as it is, in its own interpreter, one process per episode, without any code of ours.

Called as `python -I corpus_worker.py FOLDER` with the data root in APPWORLD_ROOT. Standard input holds a JSON list of
episodes, each {"name", "task_id", "codes", "timeout_s", "max_interactions"}. FOLDER/<name>.json gets what can be seen
of it: {"texts": one per code, "files": {path below the task's output folder: text}, "passed", "failed"}. All of it is
code at the top of a script: a traceback of endless recursion tells how deep `execute` was called.
"""

import json
import os
import sys
from pathlib import Path

import appworld.evaluator
from appworld import AppWorld
from appworld.apps import get_all_apps
from appworld.apps.model_lib import CachedDBHandler
from appworld.common.path_store import path_store
from appworld.common.utils import import_apis_module, import_models_module

AT_ONCE = 2
folder, episodes = Path(sys.argv[1]), json.load(sys.stdin)
for app in get_all_apps():  # imports alone, so that not every process repeats them
    import_models_module(app), import_apis_module(app)
waiting, running = list(episodes), 0
while waiting or running:
    if not waiting or running == AT_ONCE:
        _, status = os.wait()
        assert status == 0, "an episode's process failed"
        running -= 1
    elif os.fork():
        waiting.pop(0)
        running += 1
    else:
        break
else:
    for episode in episodes:
        tests = appworld.evaluator.evaluate_task(episode["task_id"], episode["name"], save_report=False)
        CachedDBHandler.reset()
        seen = json.loads((folder / f"{episode['name']}.json").read_text())
        seen["passed"] = [entry["requirement"] for entry in tests.passes]
        seen["failed"] = [entry["requirement"] for entry in tests.failures]
        (folder / f"{episode['name']}.json").write_text(json.dumps(seen))
    os._exit(0)  # after many databases the interpreter spins on its way out

episode = waiting[0]
world = AppWorld(
    task_id=episode["task_id"],
    experiment_name=episode["name"],
    load_ground_truth=False,
    max_interactions=episode["max_interactions"],
    timeout_seconds=episode["timeout_s"],
)
texts = []
for code in episode["codes"]:
    try:
        text = world.execute(code)
    except Exception as error:
        text = f"execute raised {type(error).__name__}"
        world.safety_guard.disable()
    texts.append(text)
output = Path(path_store.experiment_outputs, episode["name"], "tasks", episode["task_id"])
files = {str(path.relative_to(output)): path.read_text() for path in sorted(output.rglob("*")) if path.is_file()}
(folder / f"{episode['name']}.json").write_text(json.dumps({"texts": texts, "files": files}))
sys.stdout.flush()
os._exit(0)
