"""Tests of the verdict on a step, which is read from a server's text."""

import pytest

from gvpo_trl.environments.appworld.http.verdicts import FAILED, verdict_of
from gvpo_trl.failures import FailureKind

K = FailureKind
FRAME = FAILED + '  File "<python-input>", line 1, in <module>\n    '


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FRAME + "x\nValueError: a\n", K.RUNTIME),
        (FRAME + "x\nException: Response status code is 401:\n{}", K.API),
        (FRAME + "x\nException: Response status code is 401:", K.RUNTIME),
        (
            FRAME + "x\nException: Response status code is 401:\n{}\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "<python-input>", line 4, in <module>\nValueError: b',
            K.RUNTIME,
        ),
        (FRAME + "x\nException: Execution timed out after 3 seconds.", K.TIMEOUT),
        (FRAME + "x\nException: Execution timed out after 300 seconds.", K.RUNTIME),
        (FAILED + "Execution timed out after 3 seconds.", K.TIMEOUT),
        (FAILED, None),
        (FAILED + "anything", None),
        ("Execution successful.", None),
        ("  " + FRAME, None),
    ],
)
def test_the_verdict_of_a_text(text, kind):
    assert verdict_of("code", text, seconds=4.0) is kind
    assert verdict_of(" \n", text, seconds=4.0) is K.NO_CODE
