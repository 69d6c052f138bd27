"""A host with its defences switched off: the control of attempts that need the two processes of the split.

Run in a host's place, with the same arguments; `script` in its configuration names the host's own script, which is
loaded as it is and patched before it starts. Standard library and appworld only, like the hosts.
"""

import contextlib
import importlib.util
import json
import os
import sys


def load(path: str):
    spec = importlib.util.spec_from_file_location("host", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_agents(agent) -> dict:
    """Interpreters that are not restricted."""
    agent.sandbox.restrict = lambda **options: ()
    agent.sandbox.self_test = lambda planted, layers: []
    return {"agent": agent.serve_agent}


def open_worlds(host) -> dict:
    """Worlds that answer whatever they are asked, and evaluations that believe what was saved."""
    world, wire = host.world_process, sys.modules["wire"]

    class TrustingWorld(world.World):
        @property
        def stepping(self):
            return True

        @stepping.setter
        def stepping(self, value):
            pass

        def refuses(self, app, api):
            return False

        def _next_call(self):
            return expect_nothing_odd(super()._next_call)

        def call(self, payload):
            return expect_nothing_odd(super().call, payload)

        def _in_time(self):
            return contextlib.nullcontext()

        def completed(self):
            return bool(self.world.task_completed())

    def expect_nothing_odd(function, *arguments):
        try:
            return function(*arguments)
        except world.Misuse as error:
            raise RuntimeError("nobody expected this message") from error

    def evaluate(task_id, experiment):
        from appworld.evaluator import evaluate_task

        tracker = evaluate_task(task_id, experiment, suppress_errors=True, save_report=False)
        passed, failed = ([test["requirement"] for test in tests] for tests in (tracker.passes, tracker.failures))
        return {"passed": passed, "failed": failed}

    world.World = TrustingWorld
    world.MAX_NAME = world.MAX_CALLS = world.MAX_EPISODE_BYTES = world.MAX_CHANGES_BYTES = 1 << 40
    wire.MAX_CALL_BYTES = 1 << 40
    host.host_patches.save_any_log = lambda world: None
    host.host_patches.loggable = lambda request, whole=True: request
    world.verdicts = type("Verdicts", (), {"printable": staticmethod(lambda text: text)})
    sys.modules["world_routes"].guard_routes = lambda client, public: None
    host.evaluator.evaluate = evaluate
    return {"world": host.serve_world, "evaluation": host.serve_evaluation}


if __name__ == "__main__":
    config = json.loads(os.environ["GVPO_HOST"])
    module = load(config["script"])
    is_agent = os.path.basename(config["script"]) == "agent.py"
    os.chdir(os.environ["HOME"] if is_agent else config["scratch"])
    module.forkserver.run(module.warm_up, open_agents(module) if is_agent else open_worlds(module))
