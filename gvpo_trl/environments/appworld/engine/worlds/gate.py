"""Makes API calls for an untrusted interpreter, within bounds for a call, a step and an episode."""

import contextlib
import json
import resource
import signal
import time
from collections.abc import Iterator

from gvpo_trl.environments.appworld.engine.worlds import patches, routes
from gvpo_trl.environments.appworld.engine.worlds.accounts import Accounts
from gvpo_trl.environments.appworld.wire import frames, values

MAX_NAME = 200
"""Characters that the names of an app and an API have together at most."""
MAX_CALLS = 10
"""Messages that a step may send, as a multiple of AppWorld's limit on API calls; AppWorld does not count all calls."""
MAX_EPISODE_BYTES = 64 * 1024 * 1024
"""Bytes that all calls of an episode may have."""
MAX_CHANGES_BYTES = 16 * 1024 * 1024
"""Bytes that all statements may have with which an episode changes its databases."""
CPU_AFTER_S = 2
"""CPU time that a call may take beyond the deadline of its step before the kernel ends the world."""
_REFUSED = '{"message": "This API is not for agents."}'
_NOT_ARGUMENTS = ("client", "raise_on_failure", "track", "_app_name", "_api_name")
"""Arguments of AppWorld's requester itself, which are no parameters of an API."""


class Gate:
    """Takes the messages of an interpreter, and calls public APIs of one open world for it.

    Args:
        world: an open `AppWorld`.
        apis: what `world.public_apis` returned.
    """

    def __init__(self, world, apis: dict[str, list[str]]) -> None:
        self.world, self.apis = world, apis
        endpoints = routes.public_endpoints({app: names for app, names in apis.items() if app != "admin"})
        self.callable = set(endpoints.values())
        self.random = values.SharedRandom()
        routes.guard_routes(world.requester.client, endpoints, self._note_endpoint)
        self.accounts = Accounts(world, endpoints, self.random)
        self.changes = patches.bound_changes(MAX_CHANGES_BYTES)
        self.log = patches.RequestLog(world.requester.request_tracker.requests)
        self.is_open = False
        self.deadline = 0.0
        self.calling = False
        self.received_bytes = 0
        self.messages_in_step = 0
        self.calls: list[str] = []
        self.api_errors: list[str] = []

    def begin_step(self, seconds: float) -> None:
        """Allow calls for the given seconds, unless the world takes no more steps."""
        self.calls, self.api_errors, self.messages_in_step = [], [], 0
        self.deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
        self.is_open = self.world.num_interactions < self.world.max_interactions

    def end_step(self) -> None:
        """Refuse calls until the next step begins."""
        self.is_open = False

    def call(self, payload: bytes) -> dict:
        """Make one API call for the agent.

        Raises:
            Misuse: `agents.calls.Calls` never sends such a message, or the message is one too many.
        """
        self._spend(len(payload))
        try:
            frames.check_nodes(payload)
            call = json.loads(payload)
            number, app, api = call["id"], call["app"], call["api"]
            arguments, state = values.decode(call["arguments"]), call["random"]
        except Exception as error:
            raise Misuse(f"a message that is no call ({type(error).__name__})") from error
        if type(number) is not int or type(app) is not str or type(api) is not str or type(arguments) is not dict:
            raise Misuse("a call whose number, names or arguments are none")
        if len(app) + len(api) > MAX_NAME or not all(type(name) is str for name in arguments):
            raise Misuse("a call whose names are none")
        refusal = {"id": number, "status": 403, "text": _REFUSED}
        if not self.is_open:
            return refusal
        if state is not None:
            self.random.take(state)
        if self.refuses(app, api):
            return refusal
        with self._in_time():
            reply = self._request(app, api, arguments, len(payload))
        return {"id": number} | reply | {"random": self.random.changed_state()}

    def _spend(self, size: int) -> None:
        self.received_bytes += size
        if self.received_bytes > MAX_EPISODE_BYTES:
            raise Misuse(f"{self.received_bytes} bytes of calls")
        self.messages_in_step += 1
        if self.messages_in_step > MAX_CALLS * self.world.max_api_calls_per_interaction:
            raise Misuse(f"{self.messages_in_step} calls in a step")

    def refuses(self, app: str, api: str) -> bool:
        """Whether the API exists but is not for agents."""
        from appworld.requester import _get_api_name_to_doc

        if (app, api) in self.callable:
            return False
        return app in self.apis and (app == "admin" or api in _get_api_name_to_doc(app, include_private_apis=True))

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
        """Return the response of AppWorld's requester to a call of `size` bytes, and the requests that it logs."""
        arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
        before, logged, text = len(self.calls), len(self.log.requests), ""
        try:
            response = self.world.requester._request(app, api, raise_on_failure=False, **arguments)
            text = response.text
            reply = {"status": response.status_code, "text": text}
            self._note_response(before, f"{app}.{api}", response.status_code)
        except Exception as error:
            reply = {"error": values.describe_error(error)}
        finally:
            self.accounts.end_call(text)
        if self.changes.spent > MAX_CHANGES_BYTES:
            raise Misuse(f"calls that change {self.changes.spent} bytes")
        return reply | {"tracked": [values.encode(request) for request in self.log.bound_from(logged, size)]}

    def _note_endpoint(self, name: str) -> None:
        """Record the endpoint that the agent's call reaches. Its arguments can lead it past the API that it names."""
        if self.calling:
            self.calls.append(name)

    def _note_response(self, before: int, asked: str, status: int) -> None:
        if len(self.calls) == before:  # the address had no route
            self.calls.append(asked)
        if status != 200:
            self.api_errors.append(self.calls[-1])


def _limit_cpu(seconds: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else hard, hard))


class Overdue(BaseException):
    """The time of a call is up. An API could catch an `Exception`, so this is a `BaseException`."""


class Misuse(Exception):
    """The interpreter sent a message that is no API call, or more than any task needs.

    Args:
        what: words that follow "The interpreter sent".
        kind: the failure kind of the step.
    """

    def __init__(self, what: str, kind: str = "forbidden") -> None:
        super().__init__(what)
        self.kind = kind
