"""The interpreter reports the line on which the statement begins that raised, in both isolation modes."""

import pytest

from gvpo_trl.failures import FailureKind

LINES = {
    "x = 1\ny = 1 / 0\nz = 2": 2,
    "x = 1\n\ny = (\n    1 +\n    1 / 0\n)": 3,
    "x = 0\nfor i in range(3):\n    x += 1\n    1 / (1 - i)\n    x += 2": 4,
    "def f():\n    return 1 / 0\n\nx = 1\nf()": 5,
    "def g(x):\n    return x\n\n@g\n@g(1)\ndef h():\n    pass": 4,
    "if True:\n    with __import__('io').StringIO():\n        print(\n            undefined\n        )": 3,
    "x = 1\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('x')": 5,
    "x = 1\napis.simple_note.show_account()\ny = 2": 2,
    "x = 1\nimport json\njson.loads('{')": 3,
    "x = 1\ny = (2\nz = 3 +": 2,
    "x = 1\ny = 2 +\nz = 3": 2,
    "x = 1\nbreak\ny = 2": 2,
    "x = 1\nraise KeyboardInterrupt if False else Exception('a')": 2,
    "x = 1\nexec('1 / 0')": 2,
    "print(1)": None,
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print('caught')": None,
    "x = 1\nget_ipython().run_cell('1 / 0')": None,
}


@pytest.fixture(scope="module")
def beside(pocket_root, appworld_venv):
    """Episodes whose agent code runs in the world's process."""
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    options = {"venv": appworld_venv, "rehearse": False, "step_timeout_s": 20}
    with AppWorldEnvironments(pocket_root, isolation="process", **options) as environments:
        yield environments


@pytest.mark.parametrize("isolation", ["split", "process"])
def test_the_line_of_the_statement_that_raised(isolation, environments, beside, pocket_root):
    task = (pocket_root / "data" / "datasets" / "train.txt").read_text().split()[0]
    with (environments if isolation == "split" else beside).open(task) as episode:
        found = {code: episode.step(code).failed_line for code in LINES}
        assert found == LINES
        episode.step("def earlier():\n    x = 1\n    return 1 / 0")
        assert episode.step("a = 1\nb = 2\nc = 3\nearlier()").failed_line == 4
        episode.step("vars(__import__('sys'))['modules']['ast'].parse = None")  # AppWorld itself needs it
        broken = episode.step("a = 1\n1 / 0")
        assert (broken.failure, broken.failed_line, broken.ended) == (FailureKind.RUNTIME, None, False)
