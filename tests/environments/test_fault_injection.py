"""A small run of `benchmarks.faults`: nothing is lost, wrongly shaped, late or left behind.

The other tests show each of the benchmark's judgements one wrong outcome, which it must find.
"""

import dataclasses
import threading

import pytest
import torch

from benchmarks.faults.endings import training_stops
from benchmarks.faults.judge import Findings
from benchmarks.faults.leftovers import Leftovers
from benchmarks.faults.run import inject, pick_tasks
from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.types import StopReason

pytestmark = pytest.mark.faults

EPISODES, RATE, SEED = 20, 0.3, 45


@pytest.fixture(scope="module")
def played(pocket_root, appworld_venv, tmp_path_factory):
    """A small run and its findings."""
    folder = tmp_path_factory.mktemp("faults")
    options = {"max_episodes": 4, "step_timeout_s": 3, "venv": appworld_venv}
    return inject(pocket_root, folder, episodes=EPISODES, rate=RATE, seed=SEED, **options)


def test_nothing_is_lost_wrongly_shaped_late_or_left_behind(played):
    run, findings = played
    assert findings == Findings()
    assert run.misbehaved.total() >= EPISODES // 3 and run.faults.injected.total() >= EPISODES // 10
    assert run.totals["retried"] > 0


@pytest.fixture
def judged(played):
    """A function that judges the last batch of the run again with one changed row, and returns the findings."""
    run, _ = played

    def judge(change=None, advantages=None, logged=None):
        rows, shaped, lines = run.last
        number = next(n for n, (row, _, t) in enumerate(rows) if t.steps and not run.faults.attempts[row][0].hits)
        if change is not None:
            rows = list(rows)
            rows[number] = (*rows[number][:2], change(rows[number][2]))
        last, before = run.last, run.findings
        run.findings = Findings()
        try:
            run.judge(rows, shaped if advantages is None else advantages(shaped), lines if logged is None else logged)
            return run.findings
        finally:
            run.last, run.findings = last, before

    assert judge() == Findings()
    return judge


def test_a_row_that_is_given_up_without_a_fault_is_lost(judged):
    given_up = {"score": None, "stop": StopReason.ENVIRONMENT_LOST, "retries": 1, "fault": "episode: gone"}
    assert judged(lambda trajectory: dataclasses.replace(trajectory, **given_up)).lost


def test_a_retry_without_a_fault_is_lost(judged):
    assert judged(lambda trajectory: dataclasses.replace(trajectory, retries=1, fault="episode: gone")).lost


def test_a_fault_that_the_log_does_not_tell_is_lost(judged):
    assert judged(logged=["Task a, attempt 1: something"]).lost


def test_a_mark_on_another_step_is_wrong(judged):
    def mark(trajectory):
        first, *rest = trajectory.steps
        kind = FailureKind.API if first.failure is None else None
        return dataclasses.replace(trajectory, steps=[dataclasses.replace(first, failure=kind), *rest])

    assert judged(mark).wrongly_shaped


def test_a_token_with_another_advantage_is_wrong(judged):
    def move(shaped):
        moved = shaped.clone()
        moved[-1, 0] += 0.01
        return moved

    assert len(judged(advantages=move).wrongly_shaped) == 1
    assert judged(advantages=torch.zeros_like).wrongly_shaped


def test_leftovers_are_seen(tmp_path):
    before, over = Leftovers(tmp_path), threading.Event()
    assert before.after() == []
    thread = threading.Thread(target=over.wait, name="forgotten")
    thread.start()
    with open(tmp_path / "forgotten", "w"):
        kinds = [line.split()[0] for line in before.after()]
        over.set()
        thread.join()
    assert kinds == ["thread", "descriptor", "file"]


def test_hosts_that_die_again_and_again_stop_the_training_with_its_checkpoint_intact(
    pocket_root, appworld_venv, tmp_path
):
    assert training_stops(pocket_root, tmp_path, pick_tasks(pocket_root)[0], venv=appworld_venv) == []
