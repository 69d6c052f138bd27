"""The scripts of the agents of `benchmarks.faults`: solutions in a few turns, with one misbehaviour among them."""

import ast
import random
import textwrap
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gvpo_trl.failures import FailureKind

TURNS = 5
"""Most turns of a trajectory. A script that does not complete its task repeats its last turn."""
CHUNKS = 3
"""Turns into which a solution is cut."""
K = FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Misbehaviour:
    """A turn in which an agent misbehaves."""

    text: str
    """The code of the turn, or the whole turn where `is_code` is off."""
    failure: FailureKind | None
    """How the step has to be marked."""
    ends: bool = False
    """Whether the turn ends the interpreter, and with it the episode."""
    spoils: bool = False
    """Whether later steps may fail because of what the turn has changed; their failures are the agent's too."""
    is_code: bool = True

    @property
    def passes(self) -> bool:
        """Whether the rest of the solution works as it does without this turn."""
        return not self.ends and not self.spoils


def _code(source: str, failure: FailureKind | None, **traits: bool) -> Misbehaviour:
    return Misbehaviour(text=textwrap.dedent(source).strip(), failure=failure, **traits)


MISBEHAVIOURS = {
    "syntax": _code("total = (", K.SYNTAX),
    "runtime": _code("{}['missing']", K.RUNTIME),
    "api": _code("apis.venmo.login(username='nobody@example.com', password='wrong')", K.API),
    "forbidden": _code("import os\nprint(os.listdir('.'))", K.FORBIDDEN),
    "no code": Misbehaviour(text="Let me think about it first.", failure=K.NO_CODE, is_code=False),
    "endless loop": _code("while True:\n    pass", K.TIMEOUT),
    # The loop is in a function of its own, because in Python 3.11 its jump back lies outside the handler around it.
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
        None,
    ),
    # Most of the memory is claimed and not written, because a busy machine takes seconds to write a gigabyte.
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
        None,
    ),
    "garbage on its channel": _code(
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
    ),
}
REFUSED = ("fork", "deleted output folder")
"""What an interpreter without a world is not allowed to do."""
ON_CHANNELS = ("garbage on its channel",)
"""What only an interpreter without a world answers for: beside its world it would garble the world's own channel."""


def misbehaviours(isolation: str) -> dict[str, Misbehaviour]:
    """Every kind of misbehaviour by name, as it has to be marked in that mode."""
    if isolation != "split":
        return {name: kind for name, kind in MISBEHAVIOURS.items() if name not in ON_CHANNELS}
    refused = {name: replace(MISBEHAVIOURS[name], failure=K.RUNTIME) for name in REFUSED}
    return MISBEHAVIOURS | refused


@dataclass(frozen=True, slots=True)
class Script:
    """Everything that one agent does. Equal scripts have equal outcomes."""

    task_id: str
    ending: str
    """`solved`, `declared` (complete after the first turn, as the agent says) or `dawdling` (never complete)."""
    kind: str | None = None
    """Name of the misbehaviour, if there is one."""
    position: int = 0
    """How many turns of the solution come before the misbehaviour."""


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
        """Draw scripts for one task. In some groups all scripts succeed, so only failed steps tell the rows apart."""
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
        """Whether exactly the misbehaviour of a script is marked in a trajectory, and with the right kind.

        Args:
            script: what was played.
            failures: the failures of the steps that were taken, in order; the machinery may have cut them short.
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
