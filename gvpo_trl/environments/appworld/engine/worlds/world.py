"""Holds one world for an interpreter in another process, between the trusted trainer and untrusted agent code.

No agent code runs here. The interpreter can ask for one thing: a call of a public API, by app, name and arguments
(`gate.py`). This process counts the steps, knows whether the task was declared complete, and saves the state.
"""

import json
import select
import socket
import sys

from gvpo_trl.environments.appworld.engine.worlds import patches
from gvpo_trl.environments.appworld.engine.worlds.gate import Gate, Misuse
from gvpo_trl.environments.appworld.wire import frames, texts, values

MAX_LOG_BYTES = 64 * 1024 * 1024
"""Bytes of memory for the texts of an episode's log; later texts are cut to `SHORT_LOG_CHARS`."""
SHORT_LOG_CHARS = 1000


def public_apis() -> dict[str, list[str]]:
    """Return the APIs that an agent finds in `apis`, by app in AppWorld's order."""
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
        apis: what `public_apis` returned.
        saves_at_the_end: whether the state is saved once, at the end, and not after every step as AppWorld does.
    """

    def __init__(self, world, apis: dict[str, list[str]], saves_at_the_end: bool) -> None:
        self.world, self.apis, self.saves_at_the_end = world, apis, saves_at_the_end
        log_as_described()
        patches.save_any_log(world)
        self.gate = Gate(world, apis)
        self.incoming, self.outgoing = frames.FrameBuffer(values.MAX_CALL_BYTES), bytearray()
        self.misuse: Misuse | None = None
        self.logged_bytes = 0
        self.was_completed, self.seen_changes = False, patches.count_changes("/supervisor")

    def facts(self) -> dict:
        """Return what an interpreter has to know of the world."""
        return {
            "apis": self.apis,
            "datetime": self.world.task.datetime.isoformat(),
            "random_seed": self.world.random_seed,
            "gc_threshold": self.world.init_defaults.gc_threshold,
        }

    def serve(self, trainer: socket.socket, agent: socket.socket) -> None:
        """Answer trainer and interpreter until the trainer sends `finish` or is gone. The trainer comes first.

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
        """Read a piece of a call or write a piece of an answer; return whether the connection can still be used."""
        try:
            if self.outgoing:
                del self.outgoing[: agent.send(self.outgoing)]
                return True
            chunk = agent.recv(frames.PIECE_BYTES)
            payload = self._next_call(chunk)
            if payload is not None:
                self.outgoing += frames.pack_frame(self._answer_call(payload))
                del self.outgoing[: agent.send(self.outgoing)]
            return bool(chunk)
        except BlockingIOError:
            return True
        except OSError:
            return False
        except Misuse as error:
            self.misuse = error
            return False

    def _next_call(self, chunk: bytes) -> bytes | None:
        try:
            payload = self.incoming.feed(chunk)
        except frames.FrameTooLong as error:
            raise Misuse(f"a call of {error.announced} bytes") from error
        if payload is not None and len(self.incoming):
            raise Misuse("a second call before the first was answered")
        return payload

    def _answer_call(self, payload: bytes) -> bytes:
        answer = json.dumps(self.gate.call(payload)).encode()
        if len(answer) > frames.MAX_FRAME_BYTES:
            raise Misuse(f"a call whose answer has {len(answer)} bytes")
        return answer

    def answer(self, message: dict) -> dict | None:
        """Do what the trainer asks: `begin` or `end` a step, or `finish` the episode."""
        if message["op"] == "begin":
            self.world.requester.reset_request_count()
            self.gate.begin_step(message["seconds"])
            return None
        try:
            if message["op"] == "end":
                return self._end_step(message["logged"], bool(message["counted"]))
            if self.saves_at_the_end:
                self.world.save_all()
            return {}
        except Exception as error:
            return {"fault": f"cannot save the world: {type(error).__name__}: {error}"}

    def _end_step(self, logged: dict, counted: bool) -> dict:
        self.gate.end_step()
        self.world.requester.reset_request_count()
        self.world.environment_io.append({name: self._bound_text(str(logged[name])) for name in ("input", "output")})
        self.world.num_interactions += counted or self.gate.messages_in_step > 0
        if counted:
            if not self.saves_at_the_end:
                self.world._save_state(self.world.output_db_home_path_on_disk)
            self.world.save_logs()
        misuse = self.misuse
        return {
            "api_calls": self.gate.calls,
            "api_errors": self.gate.api_errors,
            "completed": self.completed(),
            "misuse": None if misuse is None else str(misuse),
            "kind": None if misuse is None else misuse.kind,
        }

    def _bound_text(self, text: str) -> str:
        text = texts.spelled_out(text)
        if self.logged_bytes + sys.getsizeof(text) > MAX_LOG_BYTES:
            text = texts.cut_output(text, SHORT_LOG_CHARS)
        self.logged_bytes += sys.getsizeof(text)
        return text

    def completed(self) -> bool:
        """Whether the agent has declared the task complete or given it up."""
        changes = patches.count_changes("/supervisor")
        if changes != self.seen_changes or not self.saves_at_the_end:
            # The question costs an API call, so it is asked only when the answer may have changed.
            self.seen_changes = changes
            try:
                self.was_completed = bool(self.world.task_completed())
            except Exception:
                # AppWorld accepts some answers that it cannot show, such as NaN. Then the call itself decides.
                self.was_completed = self.was_completed or "supervisor.complete_task" in self.gate.calls
        return self.was_completed
