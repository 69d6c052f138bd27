"""Attempts at the reward, the ground truth and the machinery, as agent code, and the sign that one of them worked.

The attempts are data. `attack_worker.py` makes them on the real engine; `test_attacks.py` says what must come out.
Four files hold them by their target: `attacks_on_files`, `attacks_on_worlds`, `attacks_on_machines` and
`attacks_on_rows`.
"""

from dataclasses import dataclass
from enum import StrEnum


class Sign(StrEnum):
    """What shows that an attempt worked; where possible it is more than a claim in a step's text."""

    LEAK = "leak"
    """A text held what agent code must not know: ground truth, a credential, another user's or episode's data."""
    REWARD = "reward"
    """The score differs from the score of the same honest calls without the attempt."""
    LOOT = "loot"
    """The attempt left something in the folder that is open to it, or a file of the data root has changed."""
    VICTIM = "victim"
    """A process that does not belong to the agent was ended."""
    HEARD = "heard"
    """A message came out over a socket."""
    COMPLETED = "completed"
    """The trainer believes that the task was declared complete, which it was not."""
    LOST = "lost"
    """The agent caused a fault, so the row cannot be scored."""
    TEXT = "text"
    """The trainer got a text longer than it allows."""
    LOG = "log"
    """A host's log grew by more than agent code may write."""
    LATE = "late"
    """Our side was busy with the episode long after its deadlines. No attempt has a control for this sign."""
    SAID = "said"
    """A step printed the line `WORKED`, which an attempt does only when what it tried succeeded."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attempt."""

    kind: str
    name: str
    code: str | tuple[str, ...]
    """One or more steps, which run after `PRELUDE`."""
    sign: Sign
    """What shows that it worked. Where it is stopped, nothing at all may show."""
    control: str | None = "process"
    """Where the attempt works: with the agent's code beside the world (`"process"`), or split with the defences that
    `undefended.py` switches off (`"open"`). `None` if it works nowhere; then the row only has to survive it."""
    honest: tuple[str, ...] = ()
    """Steps before the attempt, as an honest agent makes them. The attempt must not change the reward they earn."""
    task: str = "note"
    """The kind of task; see `TASKS`. No other attempt plays the same task if this is `"own"`."""
    wait_s: float = 0.0
    """How long the trainer waits between the last step and the score."""

    @property
    def steps(self) -> tuple[str, ...]:
        return (self.code,) if isinstance(self.code, str) else self.code

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"


TASKS = {"note": "pinned note", "answer": "tell me the item", "pay": "create_transaction", "own": "text message"}
"""Kind of task -> words of its instruction."""

PRELUDE = """
posix, system, collector, ctypes, socket, signal, resource, json, clock = map(
    __import__, ("posix", "sys", "gc", "ctypes", "socket", "signal", "resource", "json", "time")
)
libc = ctypes.CDLL(None, use_errno=True)
opened = vars(__import__("_io"))["open"]

def login(app):
    passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
    email = apis.supervisor.show_profile()["email"]
    return apis[app].login(username=email, password=passwords[app])["access_token"]

def find(name):
    return next(o for o in collector.get_objects() if type(o).__name__ == name)

def passing(seconds):  # `time` stands still here
    end = clock.clock_gettime(clock.CLOCK_MONOTONIC) + seconds
    while clock.clock_gettime(clock.CLOCK_MONOTONIC) < end:
        pass

# The interpreter's two sockets: the first leads to the trainer, the second to the world, where that is elsewhere.
pipes = sorted({o.fileno() for o in collector.get_objects() if type(o) is socket.socket and o.fileno() > 2})

def frame(message):
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return len(payload).to_bytes(4, "big") + payload

def put(fd, data, whole=True):
    data = memoryview(data)
    while data:
        try:
            data = data[posix.write(fd, data):]
        except BlockingIOError:
            if not whole:
                return
            passing(0.01)

def take(fd, size):
    data = b""
    while len(data) < size:
        try:
            piece = posix.read(fd, size - len(data))
        except BlockingIOError:
            passing(0.001)
            continue
        if not piece:
            raise EOFError
        data += piece
    return data

def take_frame(fd):
    return json.loads(take(fd, int.from_bytes(take(fd, 4), "big")))

def message(app, api, arguments, number=1, random=None):
    return {"id": number, "app": app, "api": api, "arguments": arguments, "random": random}

def ask(*call):
    put(pipes[1], frame(message(*call)))
    return take_frame(pipes[1])
"""
"""Code that every attempt can use. The worker puts values in front of it: ROOT, TASK, LOOT, TRAINER, WORKSPACE,
SECRET_FILE, VICTIM, PORT, ADDRESS and SOLUTION."""


def every_attack() -> dict[str, Attack]:
    """All attempts, by id."""
    from tests.environments import attacks_on_files, attacks_on_machines, attacks_on_rows, attacks_on_worlds

    modules = (attacks_on_files, attacks_on_worlds, attacks_on_machines, attacks_on_rows)
    attacks = [attack for module in modules for attack in module.ATTACKS]
    found = {attack.id: attack for attack in attacks}
    assert len(found) == len(attacks), "two attempts share a name"
    return found
