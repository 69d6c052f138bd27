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
    sandbox.self_test = lambda *arguments, **options: []


def open_worlds() -> None:
    """Make worlds answer every request, and evaluations believe what was saved."""
    from gvpo_trl.environments.appworld.engine.worlds import evaluator, gate, host, patches, routes, world
    from gvpo_trl.environments.appworld.wire import frames, texts, values

    class TrustingGate(gate.Gate):
        @property
        def is_open(self):
            return True

        @is_open.setter
        def is_open(self, value):
            pass

        def refuses(self, app, api):
            return False

        def call(self, payload):
            return expect_nothing_odd(super().call, payload)

        def _in_time(self):
            return contextlib.nullcontext()

    class TrustingWorld(world.World):
        def _next_call(self, chunk):
            return expect_nothing_odd(super()._next_call, chunk)

        def completed(self):
            return bool(self.world.task_completed())

    def expect_nothing_odd(function, *arguments):
        try:
            return function(*arguments)
        except gate.Misuse as error:
            raise RuntimeError("nobody expected this message") from error

    def evaluate(task_id, experiment):
        from appworld.evaluator import evaluate_task

        tracker = evaluate_task(task_id, experiment, suppress_errors=True, save_report=False)
        passed, failed = ([test["requirement"] for test in tests] for tests in (tracker.passes, tracker.failures))
        return {"passed": passed, "failed": failed}

    host.World, world.Gate = TrustingWorld, TrustingGate
    gate.MAX_NAME = gate.MAX_CALLS = gate.MAX_EPISODE_BYTES = gate.MAX_CHANGES_BYTES = 1 << 40
    values.MAX_CALL_BYTES = world.MAX_LOG_BYTES = patches.LOGGED_BYTES = patches.LOGGED_NODES = 1 << 40
    frames.check_nodes = lambda payload, limit=0: None
    patches.save_any_log = lambda world: None
    patches.loggable = lambda request, whole=True: request
    texts.spelled_out = lambda text: text
    routes.guard_routes = lambda client, endpoints, note: None
    evaluator.evaluate = evaluate


if __name__ == "__main__":
    runpy.run_path(json.loads(os.environ["GVPO_HOST"])["boot"])["load_package"]()
    name = sys.argv.pop(1)
    open_agents() if name.endswith("agents.host") else open_worlds()
    importlib.import_module(name).main()
