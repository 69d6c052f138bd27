"""Code whose outcome must be AppWorld's own, to the letter: `snippets/*.txt` and what no text file keeps.

A file holds episodes, `=== name, family of the task` or `=== name, family, solved`, and in them snippets, `--- name`,
each one turn. The snippets of an episode build on each other; a solved episode ends with the reference solution.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What the agent does in one episode."""

    name: str
    family: str
    """The pocket family whose first task is played."""
    snippets: dict[str, str]
    """Code by name, in order."""
    solved: bool = False
    tight: bool = False
    """Whether it is played under `TIGHT` limits."""


TIGHT = {"step_timeout_s": 3, "max_interactions": 9}


def scripts() -> list[Script]:
    """All of the corpus."""
    found = [
        Script(name="limits", family="note_create", snippets=LIMITS, tight=True),
        Script(name="odd code", family="requests_sort", snippets=ODD, solved=True),
        Script(name="refused last", family="task_finish", snippets=REFUSED_LAST),
        Script(name="broken off", family="group_make", snippets=BROKEN_OFF),
    ]
    for path in sorted(Path(__file__).with_name("snippets").glob("*.txt")):
        for text in f"\n{path.read_text()}".split("\n=== ")[1:]:
            head, *parts = text.split("\n--- ")
            name, family, *flags = head.strip().split(", ")
            pairs = [part.partition("\n")[::2] for part in parts]
            assert len({title for title, _ in pairs}) == len(pairs), f"{path.name}: a name of {name!r} is used twice"
            snippets = {title: code.rstrip("\n") for title, code in pairs}
            found.append(Script(name=name, family=family, snippets=snippets, solved=flags == ["solved"]))
    return found


ODD = {
    "empty": "",
    "blanks": "  \n ",
    "tabs and line feeds": "\t\n\x0c\n",
    "blank lines around": "\n\n  \nprint('in the middle')\n\n",
    "indented throughout": "    x = 1\n    print(x)",
    "indented from the second line on": "x = 1\n    print(x)",
    "carriage returns": "x = 1\r\nif x:\r\n    print('windows')\r\n",
    "carriage returns alone": "x = 2\rprint('mac', x)\r",
    "a carriage return in a text": "print('''a\r\nb''')",
    "a carriage return before an error": "x = 1\r\n\r\n1 / 0\r\n",
    "a byte order mark": "\ufeffprint('marked')",
    "a null byte": "print('a')\x00",
    "a null byte in a text": "print('a\x00b')",
    "a form feed": "x = 1\n\x0cprint('next page')",
    "a vertical tab": "x = 1\x0bprint(x)",
    "a no-break space": "x = 1\u00a0+ 2",
    "a zero-width space": "print(1)\u200b",
    "a line separator": "x = 'a\u2028b'\nprint(len(x))",
    "a line separator before an error": "x = 'a\u2028b\x0c'\n1 / 0",
    "a next-line sign in a message": "raise ValueError('a\x85b\x1cc\u2029d')",
    "a coding line": "# -*- coding: utf-8 -*-\nprint('é')",
    "a coding line of another coding": "# -*- coding: latin-1 -*-\nprint('é')",
    "a coding line that is none": "# -*- coding: nonsense -*-\nprint('é')",
    "a shebang": "#!/usr/bin/env python\nprint('run')",
    "tabs for blocks": "if True:\n\tprint('tab')\n\tif True:\n\t\tprint('two')",
    "tabs and blanks mixed": "if True:\n\tx = 1\n        y = 2\nprint(x)",
    "blanks after a continuation": "x = 1 + \\ \n    2",
    "a continuation at the end": "x = 1 + \\",
    "a trailing comment": "print(1)  # a note",
    "a cell marker": "#%%\nprint('cell')",
    "a very long line": "x = '" + "a" * 50_000 + "'\nprint(len(x))",
    "very many lines": "\n".join(f"x{i} = {i}" for i in range(1500)) + "\nprint(x1499)",
    "an error far down": "\n".join(f"x{i} = {i}" for i in range(1000)) + "\nundefined",
    "deep brackets": "(" * 100 + "1" + ")" * 100,
    "too deep brackets": "(" * 250 + "1" + ")" * 250,
    "deep blocks": "\n".join("    " * i + "if True:" for i in range(60)) + "\n" + "    " * 60 + "print('deep')",
    "too deep blocks": "\n".join(" " * i + "if True:" for i in range(120)) + "\n" + " " * 120 + "print('deep')",
    "too many loops": "\n".join(" " * i + "for _ in [0]:" for i in range(30)) + "\n" + " " * 30 + "pass",
    "many arguments": "print(" + ", ".join(map(str, range(500))) + ")",
    "a big number": "print(" + "9" * 4000 + " % 7)",
    "too big a number": "print(" + "9" * 5000 + ")",
    "semicolons alone": ";;",
    "a semicolon at the end": "print(1);",
    "a backslash alone": "\\",
    "a question mark alone": "?",
    "a percent sign alone": "%",
    "an exclamation mark alone": "!",
    "a number": "5",
    "a text": "'hello'",
    "a brace": "{",
    "trailing blanks": "print('a')   \n   ",
    "an unfinished block": "for i in range(3):",
    "a class with nothing": "class A: ...",
    "a text over lines": "print('''first\n\n    second\n''')",
    "a comment with a fence": "# ```\nprint('fenced comment')\n# ```",
    "a fence after the code": "print(1)\n```",
    "the language's name": "python\nprint(1)",
    "an emoji": "😀 = 1",
    "the state after all that": "print(x, 'still here')",
}
"""Code that a text file would not keep: blanks, line ends, unusual signs, and what is long."""

LIMITS = {
    "an endless loop": "print('lost')\nwhile True:\n    pass",
    "an endless loop in a function": "def spin():\n    n = 0\n    while True:\n        n += 1\n\n"
    "def go():\n    spin()\ngo()",
    "a time-out that is swallowed": "def wait():\n    while True:\n        pass\ntry:\n    wait()\n"
    "except Exception as error:\n    print(type(error).__name__, error)\nprint('went on')",
    "an endless loop of calls": "while True:\n    apis.api_docs.search_api_docs(query='play music', page_limit=20)",
    "an error after the time-outs": "1 / 0",
    "a step after the time-outs": "print(apis.supervisor.show_profile()['email'])",
    "no interaction: code that does not parse": "print(",
    "no interaction: code that is refused": "import sys",
    "no interaction: no code": "",
    "interaction 7": "print(7)",
    "interaction 8": "apis.simple_note.show_account()",
    "interaction 9": "apis.supervisor.complete_task(status='fail')\nprint(9)",
    "one too many": "print(10)",
    "two too many": "apis.supervisor.show_profile()",
    "too many, and does not parse": "print(",
    "too many, and refused": "import sys",
    "too many, and no code": "",
}
"""Deadlines and the number of interactions, to be played under `TIGHT` limits."""

BROKEN_OFF = {
    "a star import": "from math import *\nprint(floor(2.5))",
    "an except clause after a bare one": "try:\n    pass\nexcept:\n    pass\nexcept ValueError:\n    pass",
    "a lone surrogate in the code": "x = '\udcff'",
    "a step in between": "print('goes on')",
    "a lone surrogate printed": "print('\\udcff')",
    "a step after the surrogate": "print('goes on')",
    "an argument that no log takes": "print(sorted(apis.supervisor.show_profile(extra=range(3)))[0])",
    "a step after the argument": "print('goes on')",
}
"""Code on which AppWorld's own `execute` raises instead of answering: its guard fails, or a log cannot be written."""

REFUSED_LAST = {
    "a step that runs": "print(1)",
    "a last step that is refused": "import sys",
    "a last step that does not parse": "print(",
    "a last step without code": "",
}
"""AppWorld writes its logs at the end of a step that runs: these end without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Different:
    """A snippet whose text is another one on purpose."""

    plain: str
    """AppWorld's text, or what the worker says where `execute` raised."""
    ours: str
    why: str
    modes: tuple[str, ...] = ("split", "process")


FAILED, SUCCESS = "Execution failed. Traceback:\n", "Execution successful."
GUARD = "AppWorld's guard fails on such code, so that `execute` raises; the agent is told what failed, and goes on"
LOG = "AppWorld cannot write its log, so that `execute` raises, at every later step too; ours spells out the value"
SHUT = "agents reach their world through the documented APIs alone, not by address and not unseen"
BY_ADDRESS = FAILED + (
    '  File "<python-input>", line 1, in <module>\n    {}\n'
    "Exception: Only the APIs that the documentation lists can be called: apis.<app>.<api>(...)."
)
LOCAL_ZONE = FAILED + (
    '  File "<python-input>", line 1, in <module>\n    print(pendulum.local_timezone())\n'
    "          ^^^^^^^^^^^^^^^^^^^^^^^^^\nAttributeError: 'NoneType' object has no attribute 'startswith'"
)
DIFFERENT = {
    "a star import": Different(
        plain="execute raised TypeError", ours=f"{FAILED}TypeError: 'ImportStar' object is not iterable", why=GUARD
    ),
    "an except clause after a bare one": Different(
        plain="execute raised CSTValidationError",
        ours=f"{FAILED}Traceback (most recent call last):\nSyntaxError: default 'except:' must be last",
        why=GUARD,
    ),
    "a lone surrogate in the code": Different(
        plain="execute raised UnicodeEncodeError",
        ours=f"{FAILED}UnicodeEncodeError: 'utf-8' codec can't encode character '\\udcff' in position 5: "
        "surrogates not allowed",
        why=GUARD,
    ),
    "a lone surrogate printed": Different(plain="execute raised UnicodeEncodeError", ours="\\udcff\n", why=LOG),
    "a step after the surrogate": Different(plain="execute raised UnicodeEncodeError", ours="goes on\n", why=LOG),
    "an argument that no log takes": Different(plain="execute raised ValueError", ours="birthday\n", why=LOG),
    "a step after the argument": Different(plain="execute raised ValueError", ours="goes on\n", why=LOG),
    "a get": Different(
        plain=SUCCESS, ours=BY_ADDRESS.format('requester.get("/supervisor/profile")'), why=SHUT, modes=("split",)
    ),
    "a get with data": Different(
        plain=SUCCESS,
        ours=BY_ADDRESS.format('requester.get("/spotify/songs", data={"query": "a", "page_limit": 2})'),
        why=SHUT,
        modes=("split",),
    ),
    "a get of no address": Different(
        plain=SUCCESS, ours=BY_ADDRESS.format('requester.get("supervisor/profile")'), why=SHUT, modes=("split",)
    ),
    "a post": Different(
        plain=SUCCESS,
        ours=BY_ADDRESS.format(
            'requester.post("/simple_note/auth/token", data={"username": "a"}, raise_on_failure=False)'
        ),
        why=SHUT,
        modes=("split",),
    ),
    "pendulum's own zone": Different(
        plain=LOCAL_ZONE,
        ours="UTC\n",
        why="agent code finds no file, so nothing tells the zone of the machine",
        modes=("split",),
    ),
    "requests counted": Different(plain="4\n", ours="1\n", why=SHUT, modes=("split",)),
}
"""By snippet, and kept small."""
