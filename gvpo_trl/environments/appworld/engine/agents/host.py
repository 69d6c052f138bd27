"""The interpreter that agent code runs in: a process that holds no world, no data and no ground truth.

Run by path with `python -I agent.py <control fd> <trainer's pid>` in AppWorld's own virtual environment; the
configuration is the environment variable `GVPO_HOST`, JSON. This host imports what agent code may import, makes an
IPython shell ready and then forks one interpreter per episode, which restricts itself (`sandbox.py`) before it runs
anything. API calls go over a socket to the process that holds the world (`world.py`).

What a step prints is made by AppWorld's own `execute`, called on an `AppWorld` object that was never initialized: it
has the attributes that `execute` reads, and a requester whose requests go over the socket.
"""

import copy
import gc
import json
import os
import socket
import sys
import sysconfig

from gvpo_trl import sandbox
from gvpo_trl.environments.appworld.engine import forkserver, shells, verdicts
from gvpo_trl.environments.appworld.engine.agents import calls
from gvpo_trl.environments.appworld.wire import frames, values

CONFIG: dict = {}
"""What the trainer's side asked for; `main` fills it."""
_loads, _exit = json.loads, os._exit
READABLE = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    *(entry for entry in sys.path if os.path.isdir(entry)),
    *("/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/urandom"),
)
"""What an interpreter can read: Python and its libraries, the time zones, no data of ours."""
WORLD = None
"""The object that `execute` is called on, made before the fork."""


def warm_up() -> dict:
    """Import what agent code may import and run code of many kinds once: all that interpreters would repeat."""
    global WORLD
    import appworld

    shells.preload()
    if CONFIG["fast"]:
        shells.quicken_guard()
    WORLD = shells.standing_in(CONFIG["max_interactions"], CONFIG["soft_timeout_s"])
    shells.rehearse(WORLD)
    shells.freeze_clock()
    support = sandbox.probe()
    facts = {"level": support.level, "missing": list(support.missing), "readable": list(READABLE)}
    return {"appworld": appworld.__version__, **facts}


def serve_agent(trainer: socket.socket, world: socket.socket, request: dict) -> None:
    """The life of one interpreter: restrict it, learn the task's date, run steps until the trainer is gone."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the host's log is not for agent code to write to
        os.dup2(null, fd)
    kept = (0, 1, 2, trainer.fileno(), world.fileno())
    try:
        layers = sandbox.restrict(
            keep_fds=kept,
            read_only=READABLE,
            memory_bytes=CONFIG["memory_bytes"],
            parent=os.getppid(),
        )
        leaks = [leak for canary in CONFIG["canaries"] for leak in sandbox.self_test(canary, layers, kept)]
        episode = Interpreter(WORLD, world, frames.receive(world))
    except Exception as error:
        frames.send(trainer, {"fault": f"the interpreter could not start: {type(error).__name__}: {error}"})
        return
    frames.send(trainer, {"opened": True, "layers": list(layers), "leaks": leaks})
    while True:
        try:
            message = frames.receive(trainer)
        except frames.ChannelClosed:
            _exit(0)
        frames.send(trainer, episode.step(message["code"]) | {"nonce": message["nonce"]})


class Interpreter:
    """AppWorld's `execute` over a world in another process."""

    def __init__(self, world, sock: socket.socket, hello: dict) -> None:
        from datetime import datetime

        from appworld.apps.api_lib import set_local_date_and_time, set_local_random_seed
        from appworld.common.utils import GCThreshold

        GCThreshold.set(hello["gc_threshold"])
        set_local_random_seed(hello["random_seed"])
        date_and_time = datetime.fromisoformat(hello["datetime"])
        set_local_date_and_time(date_and_time)
        world.apis, world.requester = collect_apis(hello["apis"], date_and_time, calls.Calls(sock))
        world.shell.user_ns["apis"], world.shell.user_ns["requester"] = world.apis, world.requester
        self.world = world
        self.recorder = verdicts.Recorder(world)

    def step(self, code: str) -> dict:
        """Run agent code; what the trainer's side makes a `StepResult` of, and what the world's log is to say."""
        world, limit = self.world, CONFIG["max_output_chars"]
        self.recorder.start(code)
        world.environment_io.clear()
        before, ended = world.num_interactions, False
        try:
            with verdicts.called_from_the_top():
                text = world.execute(code)
            verdict = self.recorder.verdict()
        except BaseException as error:
            # AppWorld lets these through: whatever is no `Exception`, and what its own bookkeeping trips over.
            text, verdict = verdicts.text_of(error), self.recorder.verdict(error)
            ended = verdict == "exited"
            world.safety_guard.disable()
            world.num_interactions += 1
        text = verdicts.printable(text)
        logged = world.environment_io[-1] if world.environment_io else {"input": code, "output": text}
        logged = {name: verdicts.printable(logged[name])[: limit + 1000] for name in ("input", "output")}
        if len(text) > limit:
            text, verdict = text[:limit] + f"\n[{len(text) - limit} characters more were cut]", verdict or "output"
        return {
            "text": text,
            "verdict": verdict,
            "ended": ended,
            "logged": logged,
            "counted": world.num_interactions > before,
        }


def collect_apis(names: dict[str, list[str]], date_and_time, call) -> tuple:
    """AppWorld's collection of APIs, each of which calls the world, and the requester behind them."""
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
    """AppWorld's requester with everything but `request` shut, and that one going over the socket."""
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
    CONFIG.update(json.loads(os.environ.pop("GVPO_HOST")))
    gc.disable()
    os.chdir(os.environ["HOME"])
    forkserver.run(warm_up, {"agent": serve_agent})
