"""A host with its defences switched off: the control of attempts that need the two processes of the split.

It runs in the place of `engine/boot.py`, with the same arguments; `boot` in the host's configuration is the path of
that file. The host's modules are imported as they are and patched before the host starts.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys


def open_agents() -> None:
    """Do not restrict interpreters."""
    from gvpo_trl import sandbox

    sandbox.restrict = lambda **options: ()
    sandbox.self_test = lambda *arguments: []


def open_worlds() -> None:
    """Make worlds answer every request, and evaluations believe what was saved."""
    from gvpo_trl.environments.appworld.engine.worlds import evaluator, host, patches, routes, world
    from gvpo_trl.environments.appworld.wire import texts, values

    class TrustingWorld(world.World):
        @property
        def stepping(self):
            return True

        @stepping.setter
        def stepping(self, value):
            pass

        def refuses(self, app, api):
            return False

        def _next_call(self, chunk):
            return expect_nothing_odd(super()._next_call, chunk)

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

    host.World = TrustingWorld
    world.MAX_NAME = world.MAX_CALLS = world.MAX_EPISODE_BYTES = world.MAX_CHANGES_BYTES = 1 << 40
    values.MAX_CALL_BYTES = 1 << 40
    patches.save_any_log = lambda world: None
    patches.loggable = lambda request, whole=True: request
    texts.printable = lambda text: text
    routes.guard_routes = lambda client, public: None
    evaluator.evaluate = evaluate


if __name__ == "__main__":
    runpy.run_path(json.loads(os.environ["GVPO_HOST"])["boot"])["load_package"]()
    name = sys.argv.pop(1)
    open_agents() if name.endswith("agents.host") else open_worlds()
    importlib.import_module(name).main()
