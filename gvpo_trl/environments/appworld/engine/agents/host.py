"""The program of the host of interpreters. It forks one restricted process per episode, which runs the agent's code.

`boot.py` runs `main` with the control descriptor and the trainer's process id; the environment variable `GVPO_HOST`
holds the configuration as JSON. The host imports what agent code may import and prepares an IPython shell. Then it
forks one interpreter per episode, which restricts itself (`sandbox`) before it runs agent code. An interpreter holds
no world, no data and no ground truth. Its API calls go over a socket to the process that holds the world.

The text of a step comes from AppWorld's own `execute`, called on an `AppWorld` object that was never initialized: it
has the attributes that `execute` reads, and a requester whose requests go over the socket.
"""

import copy
import gc
import json
import os
import socket
import sys
from dataclasses import dataclass

from gvpo_trl import sandbox
from gvpo_trl.environments.appworld.engine import forkserver, shells, verdicts
from gvpo_trl.environments.appworld.engine.agents import calls
from gvpo_trl.environments.appworld.wire import frames, texts, values

# Agent code may replace these in their modules.
_loads, _exit = json.loads, os._exit
READABLE: tuple[str, ...] = ()
"""Files that an interpreter can read. There are none, because the host has imported what agent code may import.

A file that several interpreters can read or look up would also carry information from one to the next: reading it
changes its time of access.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration that the trainer's side has passed."""

    max_interactions: int
    soft_timeout_s: int
    """Seconds after which AppWorld interrupts a step."""
    max_output_chars: int
    memory_bytes: int
    """Address space of an interpreter; 0 for no limit."""
    fast: bool
    """Whether to skip AppWorld's guard for code that it cannot refuse."""
    canaries: list[str]
    """Files that no interpreter must be able to read."""


class AgentHost:
    """Holds what interpreters inherit, and runs each of them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.world = None  # the object that `execute` is called on

    def warm_up(self) -> dict:
        """Import what agent code may import and run code of many kinds once, so that no interpreter has to."""
        shells.preload()
        if self.config.fast:
            shells.quicken_guard()
        self.world = shells.make_stand_in(self.config.max_interactions, self.config.soft_timeout_s)
        shells.rehearse(self.world)
        shells.freeze_clock()
        support = sandbox.probe()
        return {"level": support.level, "missing": list(support.missing)}

    def serve_agent(self, trainer: socket.socket, world: socket.socket, request: dict) -> None:
        """Restrict this interpreter, learn the task's date, and run steps until the trainer is gone."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # agent code must not write to the host's log
            os.dup2(null, fd)
        kept = (0, 1, 2, trainer.fileno(), world.fileno())
        try:
            layers = sandbox.restrict(
                keep_fds=kept,
                read_only=READABLE,
                memory_bytes=self.config.memory_bytes,
                parent=os.getppid(),
            )
            leaks = [
                leak
                for canary in self.config.canaries
                for leak in sandbox.self_test(canary, layers, kept, files=bool(READABLE))
            ]
            interpreter = Interpreter(self.world, world, frames.receive(world), self.config.max_output_chars)
        except Exception as error:
            frames.send(trainer, {"fault": f"the interpreter could not start: {type(error).__name__}: {error}"})
            return
        frames.send(trainer, {"leaks": leaks})
        while True:
            try:
                message = frames.receive(trainer)
            except frames.ChannelClosed:
                _exit(0)
            frames.send(trainer, interpreter.step(message["code"]) | {"nonce": message["nonce"]})


class Interpreter:
    """AppWorld's `execute` over a world in another process.

    Args:
        world: an object that `shells.make_stand_in` returned.
        sock: the socket to the process that holds the world.
        facts: what that process says of its world; see `World.facts`.
        max_output_chars: characters of a step's text.
    """

    def __init__(self, world, sock: socket.socket, facts: dict, max_output_chars: int) -> None:
        from datetime import datetime

        from appworld.apps.api_lib import set_local_date_and_time, set_local_random_seed
        from appworld.common.utils import GCThreshold

        GCThreshold.set(facts["gc_threshold"])
        set_local_random_seed(facts["random_seed"])
        date_and_time = datetime.fromisoformat(facts["datetime"])
        set_local_date_and_time(date_and_time)
        world.apis, world.requester = collect_apis(facts["apis"], date_and_time, calls.Calls(sock))
        world.shell.user_ns["apis"], world.shell.user_ns["requester"] = world.apis, world.requester
        self.world = world
        self.max_output_chars = max_output_chars
        self.recorder = verdicts.Recorder(world)

    def step(self, code: str) -> dict:
        """Run agent code. The trainer's side makes a `StepResult` of the answer, and the world its log entry."""
        world, limit = self.world, self.max_output_chars
        world.environment_io.clear()
        before = world.num_interactions
        outcome = verdicts.run_step(world, self.recorder, code, limit)
        logged = world.environment_io[-1] if world.environment_io else {"input": code, "output": outcome.text}
        most = limit + 1000
        return {
            "text": outcome.text,
            "verdict": outcome.verdict,
            "ended": outcome.ended,
            "failed_line": outcome.failed_line,
            "logged": {name: texts.spelled_out(logged[name][:most])[:most] for name in ("input", "output")},
            "counted": world.num_interactions > before,
        }


def collect_apis(names: dict[str, list[str]], date_and_time, call) -> tuple:
    """Return AppWorld's collection of APIs, whose calls go to the world, and the requester behind them."""
    from appworld.collections import apis

    requester = make_requester(names, date_and_time, call)
    collection = apis.ApiCollection(error_message="No app named '{key}' found.")
    for app in names:
        collection[app] = apis.CustomErrorMessageMunch.build("No API named '{key}' found in the " + app + " app.")
        for api in names[app]:
            collection[app][api] = apis._wrap_api_request(app_name=app, api_name=api, requester=requester)
    collection._requester = requester
    return collection, requester


def make_requester(names: dict[str, list[str]], date_and_time, call):
    """Return AppWorld's requester, of which only `request` works; `call` takes its requests to the world."""
    from appworld.requester import CustomResponse, Requester, RequestTracker

    class Response(CustomResponse):
        def json(self):
            return _loads(self.text)

    def shut(self, *args, **kwargs):
        raise Exception("Only the APIs that the documentation lists can be called: apis.<app>.<api>(...).")

    class SplitRequester(Requester):
        def __init__(self) -> None:
            self.client, self.remote_apis_url = "world", None
            self.apps, self.date_and_time, self.time_freezer_or_id = tuple(names), date_and_time, None
            self.raise_on_failure, self.raise_on_extra_parameters = True, False
            self.parse_datetimes = self.munchify_response = False
            self.request_tracker = RequestTracker(max_num_requests=None)

        def _request(self, _app_name, _api_name, client=None, raise_on_failure=None, track=True, **data):
            if not isinstance(_app_name, str) or _app_name not in names:
                raise Exception(f"No app named '{_app_name}' found.")
            if not isinstance(_api_name, str) or len(_api_name) > 100:
                raise Exception(f"No API named '{_api_name}' found in the {_app_name} app.")
            reply = call(str(_app_name), str(_api_name), copy.deepcopy(data))
            self.request_tracker.requests += values.decode(reply.get("tracked", []))
            if "error" in reply:
                raise values.build_error(reply["error"], sys.modules)
            response = Response(status_code=reply["status"], text=reply["text"])
            self.raise_if_failure(response, raise_on_failure)
            return response

    for name in ("_get", "_post", "_put", "_patch", "_delete", "prepare"):
        setattr(SplitRequester, name, shut)
    SplitRequester.__name__ = SplitRequester.__qualname__ = Requester.__name__
    SplitRequester.__module__ = Requester.__module__
    return SplitRequester()


def main() -> None:
    """Warm up and fork interpreters until the trainer is gone."""
    host = AgentHost(forkserver.read_config(Config))
    gc.disable()
    os.chdir(os.environ["HOME"])
    forkserver.run(host.warm_up, {"agent": host.serve_agent})
