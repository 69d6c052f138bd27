"""The process that holds a world for an interpreter elsewhere (`agent.py`): standard library and appworld's packages.

It runs no agent code. It answers API calls, by app, name and arguments and only those that are public; it counts them
and the steps, knows whether the task was declared complete, and saves the state. Nothing else can be asked of it.
"""

import json
import select
import socket
import struct

import channel  # the caller puts the sibling modules there; see `host.py`
import host_patches
import wire

_LENGTH = struct.Struct(">I")
_REFUSED = '{"message": "This API is not for agents."}'


def public_apis() -> dict[str, list[str]]:
    """The APIs that an agent finds in `apis`, by app in AppWorld's order."""
    from appworld.apps import get_all_apps
    from appworld.common.utils import get_name_to_apis

    apps = sorted({*get_all_apps(skip_admin=True), "admin", "supervisor"})
    return {app: list(get_name_to_apis(app, ignore_private_apis=True)) for app in apps}


class World:
    """One world between a trainer, who is trusted, and an interpreter, who is not.

    Args:
        world: an open `AppWorld`.
        apis: what `public_apis` gave.
        fast: whether `host_patches` saves once at the end; else after every step, as AppWorld does.
    """

    def __init__(self, world, apis: dict[str, list[str]], fast: bool) -> None:
        self.world, self.apis, self.fast = world, apis, fast
        self.callable = {(app, api) for app, names in apis.items() if app != "admin" for api in names}
        self.dice = wire.Dice()
        self.calls: list[str] = []
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.stepping = False
        self.misuse: str | None = None
        self.was_completed, self.seen_changes = False, None

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
                message = channel.receive(trainer)
                reply = self.answer(message)
                if reply is not None:
                    channel.send(trainer, reply)
                if message["op"] == "finish":
                    return
            elif ready or writable:
                talking = self._talk(agent)

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
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            self.misuse = f"a message to the world that no call makes: {type(error).__name__}: {error}"[:500]
            return False

    def _next_call(self) -> dict | None:
        if len(self.incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.incoming)
        if length > wire.MAX_CALL_BYTES:
            raise ValueError(f"it announces {length} bytes")
        end = _LENGTH.size + length
        if len(self.incoming) < end:
            return None
        if len(self.incoming) > end:
            raise ValueError("a second call before the first was answered")
        call = json.loads(self.incoming[_LENGTH.size : end])
        self.incoming.clear()
        return call

    def call(self, call: dict) -> dict:
        """Make one API call for the agent.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the message is none that `agent.Calls` sends.
        """
        app, api, arguments = (wire.decode(call[name]) for name in ("app", "api", "arguments"))
        number = int(call["id"])
        if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
            raise TypeError("arguments are no object")
        if not self.stepping:
            return {"id": number, "status": 403, "text": _REFUSED}
        if call.get("random"):
            self.dice.take(call["random"])
        self.calls.append(f"{app}.{api}")
        requester = self.world.requester
        tracker, count = requester.request_tracker, len(requester.request_tracker.requests)
        reply = {"id": number}
        if self.refuses(app, api):
            return reply | {"status": 403, "text": _REFUSED}
        # These name what a request goes through, and no parameter of an API.
        arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
        try:
            response = requester._request(app, api, raise_on_failure=False, **arguments)
            reply |= {"status": response.status_code, "text": response.text}
        except Exception as error:
            reply["error"] = wire.describe_error(error)
        new = tracker.requests[count:]
        return reply | {"tracked": [wire.encode(request) for request in new], "random": self.dice.news()}

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
            self.calls = []
            self.stepping = self.world.num_interactions < self.world.max_interactions
            return None
        if message["op"] == "end":
            self.stepping = False
            requester.reset_request_count()
            self.world.environment_io.append(message["logged"])
            self.world.num_interactions += bool(message["counted"] or self.calls)
            try:
                if not self.fast and message["counted"]:
                    self.world._save_state(self.world.output_db_home_path_on_disk)
                    self.world.save_logs()
            except Exception as error:
                return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
            return {"api_calls": self.calls, "completed": self.completed(), "misuse": self.misuse}
        try:
            if self.fast:
                self.world.save_all()
        except Exception as error:
            return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}
        return {"finished": True, "interactions": self.world.num_interactions}

    def completed(self) -> bool:
        """Whether the task was declared complete, also as failed."""
        changes = host_patches.count_changes("/supervisor") if self.fast else None
        if changes is None or changes != self.seen_changes:
            # What asks costs an API call, so it is asked only when the answer may have changed.
            self.seen_changes = changes
            self.was_completed = bool(self.world.task_completed())
        return self.was_completed


_NOT_ARGUMENTS = ("client", "raise_on_failure", "track", "_app_name", "_api_name")
