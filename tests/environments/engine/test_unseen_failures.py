"""Steps that fail without raising: the verdict names the failure, and the text stays AppWorld's."""

import pytest

from gvpo_trl.failures import FailureKind as K

REFUSED = "You are either not authorized"
UNRAISED = [
    ("print(apis.simple_note.show_account(raise_on_failure=False))", K.API, REFUSED, 1),
    ("requester.raise_on_failure = False\nprint(apis.simple_note.show_account())", K.API, REFUSED, 1),
    ("requester.raise_on_failure = True", None, "Execution successful.", 0),
    ("get_ipython().run_cell('1 / 0')", K.RUNTIME, "ZeroDivisionError", 0),
    ("get_ipython().run_cell('1 / 0', silent=True)", K.RUNTIME, "ZeroDivisionError", 0),
    ("get_ipython().run_cell('apis.simple_note.show_account()')", K.API, REFUSED, 1),
    ("get_ipython().run_cell('1 /')", K.SYNTAX, "SyntaxError", 0),
    ("get_ipython().run_cell('get_ipython().run_cell(\"1 / 0\")')", K.RUNTIME, "ZeroDivisionError", 0),
    ("async def f():\n    1 / 0\nf()", K.RUNTIME, "Execution successful.", 0),
    ("leave = exit\nleave()", K.FORBIDDEN, "Execution successful.", 0),
    ("leave = vars(__import__('sys'))['exit']\nleave()", K.FORBIDDEN, "Execution successful.", 0),
    ("import os\nremove = getattr(os, 're' + 'move')\nremove('x')", K.FORBIDDEN, "Execution successful.", 0),
]
RAISED_OR_CAUGHT = [
    ("apis.simple_note.show_account()", K.API, REFUSED, 1),
    ("try:\n    apis.simple_note.show_account()\nexcept Exception:\n    print('caught')", None, "caught\n", 1),
    ("get_ipython().run_cell('print(1)')", None, "1\n", 0),
    ("async def g():\n    return 7\nprint(await g())", None, "7\n", 0),
    ("print(apis.simple_note.show_profile(email='a@b.cd', raise_on_failure=True))", K.API, "does not exist", 1),
    ("print(apis.api_docs.show_app_descriptions(raise_on_failure=False)[0]['name'])", None, "\n", 0),
    ("print(1)", None, "1\n", 0),
]


@pytest.fixture(scope="module")
def beside(pocket_root, appworld_venv):
    """Episodes whose agent code runs in the world's process."""
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    options = {"venv": appworld_venv, "rehearse": False, "step_timeout_s": 20}
    with AppWorldEnvironments(pocket_root, isolation="process", **options) as environments:
        yield environments


@pytest.fixture(params=["split", "process"])
def episode(request, environments, beside, task):
    with (environments if request.param == "split" else beside).open(task) as episode:
        yield episode


@pytest.fixture
def task(pocket_root):
    return (pocket_root / "data" / "datasets" / "train.txt").read_text().split()[0]


def test_what_fails_without_raising_is_seen(episode):
    for code, kind, text, errors in UNRAISED + RAISED_OR_CAUGHT:
        result = episode.step(code)
        assert result.failure == kind, f"{code!r}: {result}"
        assert text in result.text, f"{code!r}: {result.text}"
        assert len(result.api_errors) == errors, f"{code!r}: {result}"
        assert not result.ended


def test_the_world_names_the_calls_that_answered_with_an_error(episode):
    code = (
        "for _ in range(2):\n    try:\n        apis.simple_note.show_account()\n    except Exception:\n        pass\n"
    )
    result = episode.step(code + "apis.api_docs.show_app_descriptions()")
    assert result.api_errors == ("simple_note.show_account",) * 2
    assert result.api_calls == ("simple_note.show_account",) * 2 + ("api_docs.show_app_descriptions",)


def test_warnings_turned_into_errors_change_no_kind(episode):
    episode.step("__import__('warnings').simplefilter('error')")
    for code, kind in [
        ("1 / 0", K.RUNTIME),
        ("apis.simple_note.show_account()", K.API),
        ("undefined", K.RUNTIME),
        ("return 1", K.SYNTAX),
        ("assert (1, 2)", K.SYNTAX),
        ("print(1)", None),
    ]:
        assert episode.step(code).failure == kind, code


def test_replaced_builtins_break_the_agents_code_alone(episode):
    names = ("sum", "sorted", "print")
    lines = ["builtins = __import__('builtins')", "def broken(*args, **kwargs):", "    raise RuntimeError('patched')"]
    assert episode.step("\n".join(lines + [f"builtins.{name} = broken" for name in names])).failure is None
    for code, kind in [("x = 1", None), ("sum([1])", K.RUNTIME), ("apis.api_docs.show_app_descriptions()", None)]:
        result = episode.step(code)
        assert (result.failure, result.ended) == (kind, False), f"{code!r}: {result}"


def test_exceptions_that_break_whatever_looks_at_them_are_failures(episode):
    hidden = "class E(Exception):\n    @property\n    def {}(self): raise ValueError\nraise E()"
    codes = [hidden.format(name) for name in ("__cause__", "__context__", "__traceback__", "args", "__class__")]
    codes += ["class E(Exception): __traceback__ = 7\nraise E()", "class E(SyntaxError):\n    filename = 7\nraise E()"]
    codes += ["class E(Exception):\n    def __str__(self): raise E()\n    __repr__ = __str__\nraise E()"]
    for code in codes:
        result = episode.step(code)
        assert (result.failure, result.ended) == (K.RUNTIME, False), f"{code!r}: {result}"
    assert episode.step("print(1)").text == "1\n"
