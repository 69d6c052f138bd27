"""`classify_step` decides which steps failed, and why."""

import pytest

from gvpo_trl.failures import FailureKind, classify_step


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.NO_CODE])
def test_the_verdict_is_the_kind(kind):
    assert classify_step(code="x = 1", verdict=kind.value) is kind
    assert classify_step(code="x = 1", verdict=kind) is kind


def test_code_that_executed_did_not_fail_whatever_it_printed():
    assert classify_step(code='print("Execution failed. Traceback:")', verdict=None) is None


@pytest.mark.parametrize("code", [None, "", " \n\t"])
def test_a_turn_without_code_is_a_kind_of_its_own_and_a_switch(code):
    assert classify_step(code=code, verdict=None) is FailureKind.NO_CODE
    assert classify_step(code=code, verdict=None, no_code_is_failure=False) is None


def test_the_switch_leaves_real_failures_alone():
    assert classify_step(code="1 / 0", verdict="runtime", no_code_is_failure=False) is FailureKind.RUNTIME


def test_an_unknown_verdict_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="lost"):
        classify_step(code="x = 1", verdict="lost")
