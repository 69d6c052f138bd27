"""Holds one world for an interpreter in another process, between a trainer who is trusted and agent code that is not.

No agent code runs here. The interpreter can ask for one thing: a call of a public API, by app, name and arguments.
This process counts calls and steps, knows whether the task was declared complete, and saves the state.
"""

import contextlib
import json
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator

from gvpo_trl.environments.appworld.engine.worlds import patches, routes
from gvpo_trl.environments.appworld.wire import frames, texts, values

MAX_NAME = 200
"""Characters that the names of an app and an API have together at most."""
MAX_CALLS = 10
"""Messages that a step may send, as a multiple of AppWorld's limit on API calls; AppWorld does not count all calls."""
MAX_EPISODE_BYTES = 64 * 1024 * 1024
"""Bytes of all calls of an episode."""
MAX_CHANGES_BYTES = 16 * 1024 * 1024
"""Bytes of all statements with which an episode changes its databases."""
CPU_AFTER_S = 2
"""CPU time that a call may take beyond the deadline of its step before the kernel ends the world."""
LOGGED_BYTES, LOGGED_IN_ALL = 10_000, 4 * 1024 * 1024
"""Once the calls of an episode have more bytes than the second, those with more than the first are logged in brief."""
_REFUSED = '{"message": "This API is not for agents."}'


def public_apis() -> dict[str, list[str]]:
    """The APIs that an agent finds in `apis`, by app in AppWorld's order."""
    from appworld.apps import get_all_apps
    from appworld.common.utils import get_name_to_apis

    apps = sorted({*get_all_apps(skip_admin=True), "admin", "supervisor"})
    return {app: list(get_name_to_apis(app, ignore_private_apis=True)) for app in apps}


def log_as_described() -> None:
    """Make the log of calls show the agent's values as it shows them in AppWorld."""
    from fastapi import encoders

    encoders.encoders_by_class_tuples[lambda value: encoders.jsonable_encoder(value.logged)] = (values.Described,)


class World:
    """One open `AppWorld` and the sockets to its trainer and its interpreter.

    Args:
        world: an open `AppWorld`.
        apis: what `public_apis` gave.
        saves_at_the_end: whether the state is saved once, at the end; else after every step, as AppWorld does.
    """

    def __init__(self, world, apis: dict[str, list[str]], saves_at_the_end: bool) -> None:
        self.world, self.apis, self.saves_at_the_end = world, apis, saves_at_the_end
        public = {app: names for app, names in apis.items() if app != "admin"}
        self.callable = {(app, api) for app, names in public.items() for api in names}
        routes.guard_routes(world.requester.client, public)
        self.messages_in_step = 0
        self.received_bytes = 0
        self.tokens: set[str] = set()
        self.random = values.SharedRandom()
        self.calls: list[str] = []
        self.incoming, self.outgoing = frames.FrameBuffer(values.MAX_CALL_BYTES), bytearray()
        self.stepping, self.calling, self.deadline = False, False, 0.0
        self.misuse: str | None = None
        self.misuse_kind = ""
        self.was_completed, self.seen_changes = False, patches.count_changes("/supervisor")
        log_as_described()
        patches.save_any_log(world)
        self.changes = patches.bound_changes(MAX_CHANGES_BYTES)

    def facts(self) -> dict:
        """What an interpreter has to know of the world."""
        return {
            "apis": self.apis,
            "datetime": self.world.task.datetime.isoformat(),
            "random_seed": self.world.random_seed,
            "gc_threshold": self.world.init_defaults.gc_threshold,
        }

    def serve(self, trainer: socket.socket, agent: socket.socket) -> None:
        """Answer both until the trainer says `finish` or is gone. The trainer's messages come first.

        The interpreter's messages wait while it has not read its last answer.
        """
        agent.setblocking(False)
        connected = True
        while True:
            readers = [trainer, agent] if connected and not self.outgoing else [trainer]
            ready, writable, _ = select.select(readers, [agent] if connected and self.outgoing else [], [])
            if trainer in ready:
                message = frames.receive(trainer)
                reply = self.answer(message)
                if reply is not None:
                    frames.send(trainer, reply)
                if message["op"] == "finish":
                    return
            elif ready or writable:
                connected = self._exchange(agent)
                if not connected:
                    agent.close()  # an interpreter that waits for an answer learns that there will be none

    def _exchange(self, agent: socket.socket) -> bool:
        """Read a piece of a call or write a piece of an answer; whether the connection is still of use."""
        try:
            if self.outgoing:
                del self.outgoing[: agent.send(self.outgoing)]
                return True
            chunk = agent.recv(frames.PIECE_BYTES)
            payload = self._next_call(chunk)
            if payload is not None:
                self.outgoing += frames.pack_frame(json.dumps(self.call(payload)).encode())
                del self.outgoing[: agent.send(self.outgoing)]
            return bool(chunk)
        except BlockingIOError:
            return True
        except OSError:
            return False
        except Misuse as error:
            self.misuse, self.misuse_kind = str(error), error.kind
            return False

    def _next_call(self, chunk: bytes) -> bytes | None:
        try:
            payload = self.incoming.feed(chunk)
        except frames.FrameTooLong as error:
            raise Misuse(f"a call of {error.announced} bytes") from error
        if payload is not None and len(self.incoming):
            raise Misuse("a second call before the first was answered")
        return payload

    def call(self, payload: bytes) -> dict:
        """Make one API call for the agent.

        Raises:
            Misuse: `agents.calls.Calls` does not send such a message.
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
        self.received_bytes += len(payload)
        if self.received_bytes > MAX_EPISODE_BYTES:
            raise Misuse(f"{self.received_bytes} bytes of calls")
        self.messages_in_step += 1
        if self.messages_in_step > MAX_CALLS * self.world.max_api_calls_per_interaction:
            raise Misuse(f"{self.messages_in_step} calls in a step")
        if not self.stepping:
            return {"id": number, "status": 403, "text": _REFUSED}
        if state is not None:
            self.random.take(state)
        self.calls.append(f"{app}.{api}")
        if self.refuses(app, api):
            return {"id": number, "status": 403, "text": _REFUSED}
        with self._in_time():
            reply = self._request(app, api, arguments, len(payload))
        return {"id": number} | reply | {"random": self.random.changed_state()}

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Interrupt a call that still runs when its step must be over; some arguments make an API run for minutes.

        An exception cannot interrupt SQLite's code. Then the world dies of SIGXCPU, which has no other cause.
        """

        def interrupt(number, frame) -> None:
            if self.calling:
                raise Overdue

        # AppWorld freezes the other clocks of its process.
        left = max(0.01, self.deadline - time.clock_gettime(time.CLOCK_MONOTONIC))
        signal.signal(signal.SIGALRM, interrupt)
        self.calling = True
        _limit_cpu(int(time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) + left) + CPU_AFTER_S)
        signal.setitimer(signal.ITIMER_REAL, left, 0.2)  # repeatedly, because some code catches everything
        try:
            yield
        except Overdue as error:
            raise Misuse("a call that takes longer than its step may", kind="timeout") from error
        finally:
            self.calling = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            _limit_cpu(resource.RLIM_INFINITY)

    def _request(self, app: str, api: str, arguments: dict, size: int) -> dict:
        """The response of AppWorld's requester to a call of `size` bytes, and the requests that it logs for it."""
        requests = self.world.requester.request_tracker.requests
        count = len(requests)
        # These are arguments of the requester itself, and no parameters of an API.
        arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
        token = arguments.get("access_token")
        if token is not None and f"{token}".count(".") == 2 and f"{token}" not in self.tokens:
            # AppWorld signs tokens with a constant, so anybody can make any user's. Only tokens given out count.
            arguments["access_token"] = "x"
        try:
            with self.random.unpredictable() if self._sends_a_code(api, arguments) else contextlib.nullcontext():
                response = self.world.requester._request(app, api, raise_on_failure=False, **arguments)
            self._remember_token(response.text)
            reply = {"status": response.status_code, "text": response.text}
        except Exception as error:
            reply = {"error": values.describe_error(error)}
        if self.changes.spent > MAX_CHANGES_BYTES:
            raise Misuse(f"calls that change {self.changes.spent} bytes")
        whole = size < LOGGED_BYTES or self.received_bytes < LOGGED_IN_ALL
        for index in range(count, len(requests)):
            if "access_token" in requests[index]["data"]:
                requests[index]["data"]["access_token"] = token  # the log shows what the agent passed
            requests[index] = patches.loggable(requests[index], whole)
        return reply | {"tracked": [values.encode(request) for request in requests[count:]]}

    def _sends_a_code(self, api: str, arguments: dict) -> bool:
        """Whether the call sends a code to somebody else, which an agent could predict by seeding `random`."""
        supervisor = self.world.task.supervisor
        own = (supervisor.email, supervisor.phone_number)
        named = [arguments[name] for name in ("email", "phone_number") if name in arguments]
        return api in _SEND_CODES and not all(type(address) is str and address in own for address in named)

    def _remember_token(self, text: str) -> None:
        if '"access_token"' in text:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                self.tokens.add(json.loads(text).get("access_token"))

    def refuses(self, app, api) -> bool:
        """Whether the API exists but is not for agents."""
        from appworld.requester import _get_api_name_to_doc

        if (app, api) in self.callable:
            return False
        return app in self.apis and (app == "admin" or api in _get_api_name_to_doc(app, include_private_apis=True))

    def answer(self, message: dict) -> dict | None:
        """Do what the trainer asks: `begin` or `end` a step, or `finish` the episode."""
        requester = self.world.requester
        if message["op"] == "begin":
            requester.reset_request_count()
            self.calls, self.messages_in_step = [], 0
            self.deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + message["seconds"]
            self.stepping = self.world.num_interactions < self.world.max_interactions
            return None
        if message["op"] == "end":
            self.stepping = False
            requester.reset_request_count()
            logged = {name: texts.printable(str(message["logged"][name])) for name in ("input", "output")}
            self.world.environment_io.append(logged)
            self.world.num_interactions += bool(message["counted"] or self.calls)
            try:
                if message["counted"]:
                    if not self.saves_at_the_end:
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
            if self.saves_at_the_end:
                self.world.save_all()
        except Exception as error:
            return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
        return {}

    def completed(self) -> bool:
        """Whether the task was declared complete, also as failed."""
        changes = patches.count_changes("/supervisor")
        if changes != self.seen_changes or not self.saves_at_the_end:
            # The question costs an API call, so it is asked only when the answer may have changed.
            self.seen_changes = changes
            try:
                self.was_completed = bool(self.world.task_completed())
            except Exception:
                # AppWorld takes some answers that it cannot show, such as NaN. Then the call itself decides.
                self.was_completed = self.was_completed or "supervisor.complete_task" in self.calls
        return self.was_completed


def _limit_cpu(seconds: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else hard, hard))


class Overdue(BaseException):
    """The time of a call is up. An API could catch an `Exception`, so this is none."""


class Misuse(Exception):
    """The interpreter sent a message that no API call makes, or more than any task needs.

    Args:
        what: words that follow "The interpreter sent".
        kind: the failure kind of the step.
    """

    def __init__(self, what: str, kind: str = "forbidden") -> None:
        super().__init__(what)
        self.kind = kind


_NOT_ARGUMENTS = ("client", "raise_on_failure", "track", "_app_name", "_api_name")
_SEND_CODES = ("send_verification_code", "send_password_reset_code")
"""APIs that draw a code, with which an account can be taken over."""
