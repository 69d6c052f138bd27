"""What the agents of `benchmarks.faults` do: solutions in a few turns, with misbehaviour of every kind put between."""

import ast
import random
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gvpo_trl.failures import FailureKind

TURNS = 5
"""Turns of a trajectory at most. A script that does not complete its task repeats its last turn."""
CHUNKS = 3
"""Turns that a solution is cut into."""
K = FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Misbehaviour:
    """One turn of an agent that does what it should not."""

    text: str
    """The code of the turn, or the whole turn where `is_code` is off."""
    failure: FailureKind | None
    """How the step has to be marked."""
    ends: bool = False
    """Whether the interpreter, and with it the episode, must be gone afterwards."""
    spoils: bool = False
    """Whether later steps may fail as well, for what it left behind: their failures are the agent's too."""
    is_code: bool = True

    @property
    def passes(self) -> bool:
        """Whether the rest of the solution works as if nothing had been."""
        return not self.ends and not self.spoils


def _code(source: str, failure: FailureKind | None, **traits: bool) -> Misbehaviour:
    return Misbehaviour(text=textwrap.dedent(source).strip(), failure=failure, **traits)


def misbehaviours(isolation: str) -> dict[str, Misbehaviour]:
    """Every kind by name. What an interpreter without a world is refused works in one that runs beside its world."""
    split = isolation == "split"
    refused = K.RUNTIME if split else None
    kinds = {
        "syntax": _code("total = (", K.SYNTAX),
        "runtime": _code("{}['missing']", K.RUNTIME),
        "api": _code("apis.venmo.login(username='nobody@example.com', password='wrong')", K.API),
        "forbidden": _code("import os\nprint(os.listdir('.'))", K.FORBIDDEN),
        "no code": Misbehaviour(text="Let me think about it first.", failure=K.NO_CODE, is_code=False),
        "endless loop": _code("while True:\n    pass", K.TIMEOUT),
        # In a function of its own: Python 3.11 leaves the jump back of a loop outside the handler around it.
        "loop that swallows exceptions": _code(
            """
            def spin():
                while True:
                    sum(range(9))
            while True:
                try:
                    spin()
                except BaseException:
                    pass
            """,
            K.TIMEOUT,
            ends=True,
        ),
        "C code": _code("sum(range(10 ** 14))", K.TIMEOUT, ends=True),
        "KeyboardInterrupt": _code("raise KeyboardInterrupt", K.EXITED, ends=True),
        "SystemExit": _code("raise SystemExit(1)", K.RUNTIME),
        "own BaseException": _code("class Mine(BaseException):\n    pass\nraise Mine", K.EXITED, ends=True),
        "os._exit": _code("__import__('posix')._exit(0)", K.EXITED, ends=True),
        "fork": _code(
            """
            posix = __import__('posix')
            if posix.fork() == 0:
                posix.setsid()
                while True:
                    pass
            """,
            refused,
        ),
        # Filled at first, then claimed: a gigabyte of pages alone takes seconds on a machine that is busy.
        "memory": _code("hoard = [b'x' * (1 << 28)]\nwhile True:\n    hoard.append(bytes(1 << 26))", K.MEMORY),
        "100 MB printed": _code("print('x' * 100_000_000)", K.OUTPUT),
        "endless recursion": _code("def deeper():\n    deeper()\ndeeper()", K.RUNTIME),
        "logout everywhere": _code(
            """
            for name in list(apis):
                try:
                    apis[name].logout(access_token=token)
                except Exception:
                    pass
            """,
            None,
            spoils=True,
        ),
        "patched builtins": _code(
            """
            builtins = __import__('builtins')
            def broken(*args, **kwargs):
                raise RuntimeError('patched')
            builtins.print = builtins.sorted = builtins.sum = builtins.open = builtins.exec = broken
            """,
            None,
            spoils=True,
        ),
        "closed descriptors": _code(
            """
            posix = __import__('posix')
            for descriptor in range(64):
                try:
                    posix.close(descriptor)
                except OSError:
                    pass
            """,
            K.EXITED,
            ends=True,
        ),
        "deleted output folder": _code(
            """
            posix = __import__('posix')
            def delete(folder):
                for entry in posix.listdir(folder):
                    try:
                        delete(f'{folder}/{entry}')
                    except NotADirectoryError:
                        posix.unlink(f'{folder}/{entry}')
                posix.rmdir(folder)
            worlds = [found for found in __import__('gc').get_objects() if type(found).__name__ == 'AppWorld']
            outputs = [getattr(world, 'output_directory', None) for world in worlds]
            delete(([path for path in outputs if path] or [posix.environ[b'HOME'].decode()])[0])
            """,
            refused,
        ),
    }
    if split:
        kinds["garbage on its channel"] = _code(
            """
            write = __import__('posix').write
            for descriptor in range(3, 64):
                try:
                    write(descriptor, b'\\xff\\xff\\xff\\xff garbage')
                except OSError:
                    pass
            """,
            K.FORBIDDEN,
            ends=True,
        )
    return kinds


@dataclass(frozen=True, slots=True)
class Script:
    """All that one agent does. Scripts that are equal have equal outcomes."""

    task_id: str
    ending: str
    """`solved`, `declared` (the task is called complete after the first turn) or `dawdling` (it never is)."""
    kind: str | None = None
    """Of the misbehaviour, if there is any."""
    position: int = 0
    """How many turns of the solution come before it."""


class Scripts:
    """Draws scripts and knows their turns.

    Args:
        root: data root of the tasks.
        task_ids: the tasks to draw from.
        isolation: the environments' mode.
    """

    def __init__(self, root: Path, task_ids: list[str], isolation: str) -> None:
        self.task_ids = task_ids
        self.misbehaviours = misbehaviours(isolation)
        self._solutions = {task_id: _solution(root, task_id) for task_id in task_ids}

    def draw_group(self, dice: random.Random, size: int) -> list[Script]:
        """Scripts for one task. Some groups succeed throughout, so that only failed steps tell their rows apart."""
        task_id, harmless = dice.choice(self.task_ids), dice.random() < 0.3
        odd = [name for name, kind in sorted(self.misbehaviours.items()) if not harmless or kind.passes]
        endings = ["solved"] if harmless else ["solved", "declared", "dawdling"]
        group = []
        for _ in range(size):
            if dice.random() < 0.6:
                group.append(Script(task_id, "solved", dice.choice(odd), dice.randrange(1, CHUNKS)))
            else:
                group.append(Script(task_id, dice.choice(endings)))
        return group

    def turns(self, script: Script) -> list[str]:
        """The texts of a script's turns."""
        first, *rest = self._solutions[script.task_id]
        codes = {
            "solved": [first, *rest],
            "declared": [first, "apis.supervisor.complete_task()"],
            "dawdling": [first, "print('almost there')"],
        }[script.ending]
        turns = [_block(code) for code in codes]
        if script.kind is not None:
            odd = self.misbehaviours[script.kind]
            turns.insert(script.position, _block(odd.text) if odd.is_code else odd.text)
        return turns

    def is_possible(self, script: Script, failures: list[FailureKind | None], ended: bool) -> bool:
        """Whether a trajectory's steps are marked as its script's must be: that step, in that way, and no other.

        Args:
            script: what was played.
            failures: of the steps taken, in order; fewer than the script has where the machinery broke.
            ended: whether the agent ended its interpreter.
        """
        odd = None if script.kind is None else self.misbehaviours[script.kind]
        for number, failure in enumerate(failures):
            if odd is not None and number == script.position:
                if failure is not odd.failure:
                    return False
            elif failure is not None and not (odd is not None and odd.spoils and number > script.position):
                return False
        return ended == (odd is not None and odd.ends and len(failures) == script.position + 1)


def _solution(root: Path, task_id: str) -> list[str]:
    source = (root / "data" / "tasks" / task_id / "ground_truth" / "solution.py").read_text()
    statements = [ast.unparse(statement) for statement in ast.parse(source).body[0].body]
    cuts = [len(statements) * number // CHUNKS for number in range(CHUNKS + 1)]
    return ["\n".join(statements[start:end]) for start, end in pairwise(cuts)]


def _block(code: str) -> str:
    return f"```python\n{code}\n```"
