"""The process that holds a world for an interpreter elsewhere (`agent.py`): standard library and appworld's packages.

It runs no agent code. It answers API calls, by app, name and arguments and only those that are public; it counts them
and the steps, knows whether the task was declared complete, and saves the state. Nothing else can be asked of it.
"""

import contextlib
import json
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator

from gvpo_trl.environments.appworld.engine import verdicts
from gvpo_trl.environments.appworld.engine.worlds import patches, routes
from gvpo_trl.environments.appworld.wire import frames, values

_LENGTH = struct.Struct(">I")
MAX_NAME = 200
"""Characters that the names of an app and an API have together at most."""
MAX_CALLS = 10
"""How many times as many messages as AppWorld allows calls a step may send; AppWorld does not count all of them."""
MAX_EPISODE_BYTES = 64 * 1024 * 1024
"""Bytes of all calls of an episode."""
MAX_CHANGES_BYTES = 16 * 1024 * 1024
"""Bytes of all that an episode writes to its databases, each statement whole."""
CPU_AFTER_S = 2
"""CPU time that a call may take beyond the deadline of its step before the kernel ends the world."""
LOGGED_BYTES, LOGGED_IN_ALL = 10_000, 4 * 1024 * 1024
"""A call longer than the first is logged in brief once an episode's calls are longer than the second."""
_REFUSED = '{"message": "This API is not for agents."}'


def public_apis() -> dict[str, list[str]]:
    """The APIs that an agent finds in `apis`, by app in AppWorld's order."""
    from appworld.apps import get_all_apps
    from appworld.common.utils import get_name_to_apis

    apps = sorted({*get_all_apps(skip_admin=True), "admin", "supervisor"})
    return {app: list(get_name_to_apis(app, ignore_private_apis=True)) for app in apps}


def log_as_described() -> None:
    """Have the log of calls show of the agent's values what it shows in AppWorld."""
    from fastapi import encoders

    encoders.encoders_by_class_tuples[lambda value: encoders.jsonable_encoder(value.logged)] = (values.Described,)


class World:
    """One world between a trainer, who is trusted, and an interpreter, who is not.

    Args:
        world: an open `AppWorld`.
        apis: what `public_apis` gave.
        fast: whether `host_patches` saves once at the end; else after every step, as AppWorld does.
    """

    def __init__(self, world, apis: dict[str, list[str]], fast: bool) -> None:
        self.world, self.apis, self.fast = world, apis, fast
        public = {app: names for app, names in apis.items() if app != "admin"}
        self.callable = {(app, api) for app, names in public.items() for api in names}
        routes.guard_routes(world.requester.client, public)
        self.asked = 0
        self.heard_bytes = 0
        self.tokens: set[str] = set()
        self.dice = values.Dice()
        self.calls: list[str] = []
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.stepping, self.calling, self.deadline = False, False, 0.0
        self.misuse: str | None = None
        self.misuse_kind = ""
        self.was_completed, self.seen_changes = False, patches.count_changes("/supervisor")
        log_as_described()
        patches.save_any_log(world)
        self.changes = patches.bound_changes(MAX_CHANGES_BYTES)

    def hello(self) -> dict:
        """What an interpreter has to know."""
        return {
            "apis": self.apis,
            "datetime": self.world.task.datetime.isoformat(),
            "random_seed": self.world.random_seed,
            "gc_threshold": self.world.init_defaults.gc_threshold,
        }

    def serve(self, trainer: socket.socket, agent: socket.socket) -> None:
        """Answer both until the trainer says `finish` or is gone. The trainer's messages come first.

        An interpreter that does not read its answer is not listened to until it does.
        """
        agent.setblocking(False)
        talking = True
        while True:
            hears = [trainer, agent] if talking and not self.outgoing else [trainer]
            ready, writable, _ = select.select(hears, [agent] if talking and self.outgoing else [], [])
            if trainer in ready:
                message = frames.receive(trainer)
                reply = self.answer(message)
                if reply is not None:
                    frames.send(trainer, reply)
                if message["op"] == "finish":
                    return
            elif ready or writable:
                talking = self._talk(agent)
                if not talking:
                    agent.close()  # whoever waits for an answer learns that there will be none

    def _talk(self, agent: socket.socket) -> bool:
        """Read a piece of a call or write a piece of an answer; whether the socket is still of use."""
        try:
            if self.outgoing:
                del self.outgoing[: agent.send(self.outgoing)]
                return True
            chunk = agent.recv(1 << 20)
            self.incoming += chunk
            call = self._next_call()
            if call is not None:
                answer = json.dumps(self.call(call)).encode()
                self.outgoing += _LENGTH.pack(len(answer)) + answer
                del self.outgoing[: agent.send(self.outgoing)]
            return bool(chunk)
        except BlockingIOError:
            return True
        except OSError:
            return False
        except Misuse as error:
            self.misuse, self.misuse_kind = str(error), error.kind
            return False

    def _next_call(self) -> bytes | None:
        if len(self.incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.incoming)
        if length > values.MAX_CALL_BYTES:
            raise Misuse(f"a call of {length} bytes")
        end = _LENGTH.size + length
        if len(self.incoming) < end:
            return None
        if len(self.incoming) > end:
            raise Misuse("a second call before the first was answered")
        payload = bytes(self.incoming[_LENGTH.size : end])
        self.incoming.clear()
        return payload

    def call(self, payload: bytes) -> dict:
        """Make one API call for the agent.

        Raises:
            Misuse: the message is none that `agent.Calls` sends.
        """
        try:
            call = json.loads(payload)
            number, app, api = call["id"], call["app"], call["api"]
            arguments, state = values.decode(call["arguments"]), call["random"]
        except Exception as error:
            raise Misuse(f"a message that is no call ({type(error).__name__})") from error
        if type(number) is not int or type(app) is not str or type(api) is not str or type(arguments) is not dict:
            raise Misuse("a call whose number, names or arguments are none")
        if len(app) + len(api) > MAX_NAME or not all(type(name) is str for name in arguments):
            raise Misuse("a call whose names are none")
        self.heard_bytes += len(payload)
        if self.heard_bytes > MAX_EPISODE_BYTES:
            raise Misuse(f"{self.heard_bytes} bytes of calls")
        self.asked += 1
        if self.asked > MAX_CALLS * self.world.max_api_calls_per_interaction:
            raise Misuse(f"{self.asked} calls in a step")
        if not self.stepping:
            return {"id": number, "status": 403, "text": _REFUSED}
        if state is not None:
            self.dice.take(state)
        self.calls.append(f"{app}.{api}")
        if self.refuses(app, api):
            return {"id": number, "status": 403, "text": _REFUSED}
        with self._in_time():
            reply = self._request(app, api, arguments, len(payload))
        return {"id": number} | reply | {"random": self.dice.news()}

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """End what still runs when the step must be over: some APIs take minutes for arguments made for that.

        SQLite's code cannot be interrupted by an exception. Then the world dies of SIGXCPU, which only this can cause.
        """

        def interrupt(number, frame) -> None:
            if self.calling:
                raise Overdue

        # AppWorld freezes the clock of its process, but not this one.
        left = max(0.01, self.deadline - time.clock_gettime(time.CLOCK_MONOTONIC))
        signal.signal(signal.SIGALRM, interrupt)
        self.calling = True
        _limit_cpu(int(time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) + left) + CPU_AFTER_S)
        signal.setitimer(signal.ITIMER_REAL, left, 0.2)  # again and again: some code passes over everything raised
        try:
            yield
        except Overdue as error:
            raise Misuse("a call that takes longer than its step may", kind="timeout") from error
        finally:
            self.calling = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            _limit_cpu(resource.RLIM_INFINITY)

    def _request(self, app: str, api: str, arguments: dict, size: int) -> dict:
        """What AppWorld's requester makes of a call of so many bytes, and what it keeps of it for the log."""
        requests = self.world.requester.request_tracker.requests
        count = len(requests)
        # These name what a request goes through, and no parameter of an API.
        arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
        token = arguments.get("access_token")
        if token is not None and f"{token}".count(".") == 2 and f"{token}" not in self.tokens:
            # AppWorld signs tokens with a constant, so anybody can make any user's: only those given out count.
            arguments["access_token"] = "x"
        try:
            with self.dice.unforeseeable() if self._sends_a_code(api, arguments) else contextlib.nullcontext():
                response = self.world.requester._request(app, api, raise_on_failure=False, **arguments)
            self._remember_token(response.text)
            reply = {"status": response.status_code, "text": response.text}
        except Exception as error:
            reply = {"error": values.describe_error(error)}
        if self.changes.spent > MAX_CHANGES_BYTES:
            raise Misuse(f"calls that change {self.changes.spent} bytes")
        whole = size < LOGGED_BYTES or self.heard_bytes < LOGGED_IN_ALL
        for index in range(count, len(requests)):
            if "access_token" in requests[index]["data"]:
                requests[index]["data"]["access_token"] = token  # the log tells what was passed
            requests[index] = patches.loggable(requests[index], whole)
        return reply | {"tracked": [values.encode(request) for request in requests[count:]]}

    def _sends_a_code(self, api: str, arguments: dict) -> bool:
        """Whether somebody else is sent a code, which an agent that sets the seed of `random` could foresee."""
        supervisor = self.world.task.supervisor
        own = (supervisor.email, supervisor.phone_number)
        named = [arguments[name] for name in ("email", "phone_number") if name in arguments]
        return api in _SEND_CODES and not all(type(address) is str and address in own for address in named)

    def _remember_token(self, text: str) -> None:
        if '"access_token"' in text:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                self.tokens.add(json.loads(text).get("access_token"))

    def refuses(self, app, api) -> bool:
        """Whether the API exists and is not for agents."""
        from appworld.requester import _get_api_name_to_doc

        if (app, api) in self.callable:
            return False
        return app in self.apis and (app == "admin" or api in _get_api_name_to_doc(app, include_private_apis=True))

    def answer(self, message: dict) -> dict | None:
        """What the trainer asks: `begin` and `end` a step, `finish` the episode."""
        requester = self.world.requester
        if message["op"] == "begin":
            requester.reset_request_count()
            self.calls, self.asked = [], 0
            self.deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + message["seconds"]
            self.stepping = self.world.num_interactions < self.world.max_interactions
            return None
        if message["op"] == "end":
            self.stepping = False
            requester.reset_request_count()
            logged = {name: verdicts.printable(str(message["logged"][name])) for name in ("input", "output")}
            self.world.environment_io.append(logged)
            self.world.num_interactions += bool(message["counted"] or self.calls)
            try:
                if message["counted"]:
                    if not self.fast:
                        self.world._save_state(self.world.output_db_home_path_on_disk)
                    self.world.save_logs()
            except Exception as error:
                return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
            return {
                "api_calls": self.calls,
                "completed": self.completed(),
                "misuse": self.misuse,
                "kind": self.misuse_kind,
            }
        try:
            if self.fast:
                self.world.save_all()
        except Exception as error:
            return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
        return {"finished": True, "interactions": self.world.num_interactions}

    def completed(self) -> bool:
        """Whether the task was declared complete, also as failed."""
        changes = patches.count_changes("/supervisor")
        if changes != self.seen_changes or not self.fast:
            # What asks costs an API call, so it is asked only when the answer may have changed.
            self.seen_changes = changes
            try:
                self.was_completed = bool(self.world.task_completed())
            except Exception:
                # An answer that AppWorld takes and cannot show, such as NaN: it was declared all the same.
                self.was_completed = self.was_completed or "supervisor.complete_task" in self.calls
        return self.was_completed


def _limit_cpu(seconds: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else hard, hard))


class Overdue(BaseException):
    """Time is up; no `Exception`, which an API could catch."""


class Misuse(Exception):
    """The interpreter sent what no call of an API makes, or more than any task needs.

    Args:
        what: in words that follow "sent".
        kind: the failure kind of the step.
    """

    def __init__(self, what: str, kind: str = "forbidden") -> None:
        super().__init__(what)
        self.kind = kind


_NOT_ARGUMENTS = ("client", "raise_on_failure", "track", "_app_name", "_api_name")
_SEND_CODES = ("send_verification_code", "send_password_reset_code")
"""APIs that draw a code with which somebody's account can be taken over."""
