"""A host with its defences switched off: the control of attempts that need the two processes of the split.

Run in the place of `engine/boot.py`, with the same arguments; `boot` in the host's configuration is its path. The
host's module is loaded as it is and patched before it starts. Standard library and appworld only, like the hosts.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys


def open_agents(agent) -> None:
    """Interpreters that are not restricted."""
    agent.sandbox.restrict = lambda **options: ()
    agent.sandbox.self_test = lambda *arguments: []


def open_worlds(host) -> None:
    """Worlds that answer whatever they are asked, and evaluations that believe what was saved."""
    world = host.world_module

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
    world.values.MAX_CALL_BYTES = 1 << 40
    host.patches.save_any_log = lambda world: None
    host.patches.loggable = lambda request, whole=True: request
    world.verdicts = type("Verdicts", (), {"printable": staticmethod(lambda text: text)})
    world.routes.guard_routes = lambda client, public: None
    host.evaluator.evaluate = evaluate


if __name__ == "__main__":
    runpy.run_path(json.loads(os.environ["GVPO_HOST"])["boot"])["load_package"]()
    name = sys.argv.pop(1)
    module = importlib.import_module(name)
    (open_agents if name.endswith("agents.host") else open_worlds)(module)
    module.main()
