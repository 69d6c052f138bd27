"""Overlap: the code of one half runs while the other half is sampled, and the trajectories stay the same."""

import threading

import pytest

from gvpo_trl.faults import EnvironmentsExhausted
from gvpo_trl.rollout.clock import Clock
from gvpo_trl.rollout.types import StopReason
from tests.support.rolling import DONE, GENEROUS_S, TOKENIZER, block, failing, roll
from tests.support.toy import Scripted, ToyEnvironment


class Gated(ToyEnvironment):
    """Steps of the episodes in `slow` wait for the gate; `begun` counts the steps that wait."""

    def __init__(self, slow):
        super().__init__(faults=self._wait)
        self.slow, self.gate, self.begun = slow, threading.Event(), threading.Semaphore(0)

    def _wait(self, number, place):
        if place == "step" and self.opened[number].reset.task_id in self.slow:
            self.begun.release()
            assert self.gate.wait(GENEROUS_S)


class Opening(Scripted):
    """Opens the gate at the n-th call, after the slow steps have begun."""

    def __init__(self, turns, environment, at):
        super().__init__(TOKENIZER, turns)
        self.environment, self.at = environment, at

    def __call__(self, requests):
        if len(self.calls) == self.at:
            for _ in self.environment.slow:
                assert self.environment.begun.acquire(timeout=GENEROUS_S)
            self.environment.gate.set()
        return super().__call__(requests)


SCRIPTS = [[block(f"x = {row}"), block("print(x)"), DONE] for row in range(4)]


def test_a_half_is_sampled_while_the_code_of_the_other_runs():
    environment = Gated({"task_2", "task_3"})
    generate = Opening(dict(enumerate(SCRIPTS)), environment, at=1)
    trajectories = roll(SCRIPTS, environment, generate, overlap=True, straggler_s=GENEROUS_S)
    rows = [sorted(request.trajectory for request in call) for call in generate.calls]
    assert rows[:2] == [[0, 1, 2, 3], [0, 1]]  # in lockstep the second call would never come
    assert [len(trajectory.steps) for trajectory in trajectories] == [3, 3, 3, 3]


def test_without_overlap_a_round_waits_for_every_step_in_time():
    environment = Gated({"task_2", "task_3"})
    generate = Scripted(TOKENIZER, dict(enumerate(SCRIPTS)))
    timer = threading.Timer(0.2, environment.gate.set)
    timer.start()
    roll(SCRIPTS, environment, generate, straggler_s=GENEROUS_S)
    assert [len(call) for call in generate.calls] == [4, 4, 4]


@pytest.mark.parametrize("max_episodes", [1, 3, 16])
def test_trajectories_are_those_of_lockstep(max_episodes):
    scripts = [[block("x = 1")] * length + [block("1 / 0"), DONE] for length in (0, 3, 1, 2, 0, 3, 2)]
    overlapped, lockstep = (
        roll(scripts, ToyEnvironment(max_episodes=max_episodes), overlap=overlap) for overlap in (True, False)
    )
    for ours, theirs in zip(overlapped, lockstep, strict=True):
        assert (ours.task_id, ours.stop, ours.reward) == (theirs.task_id, theirs.stop, theirs.reward)
        assert [(s.action_ids, s.bridge_ids, s.failure) for s in ours.steps] == [
            (s.action_ids, s.bridge_ids, s.failure) for s in theirs.steps
        ]


@pytest.mark.parametrize("place", ["open", "step", "score"])
def test_a_lost_environment_starts_again(place):
    trajectories = roll(SCRIPTS, failing(place), overlap=True)
    assert [trajectory.retries for trajectory in trajectories] == [1, 0, 0, 0]
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.COMPLETED}


def test_an_exhausted_environment_ends_the_rollout():
    environment = failing("step", kind=EnvironmentsExhausted)
    with pytest.raises(EnvironmentsExhausted):
        roll(SCRIPTS, environment, overlap=True)
    assert environment.live == 0


def test_a_straggler_does_not_hold_up_its_half():
    environment = Gated({"task_3"})
    generate = Opening(dict(enumerate(SCRIPTS)), environment, at=2)
    trajectories = roll(SCRIPTS, environment, generate, overlap=True)
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.COMPLETED}
    assert all(3 not in [request.trajectory for request in call] for call in generate.calls[1:3])


def test_the_clock_measures_how_long_both_ran_at_the_same_time():
    time = iter([0.0, 1.0, 4.0, 9.0])
    clock = Clock(now=lambda: next(time))
    with clock.running("environment"), clock.running("generate"):
        pass
    assert (clock.generate_s, clock.overlap_s, clock.reset_wait_s) == (3.0, 3.0, 0.0)


def test_the_clock_measures_a_block_that_raises():
    time = iter([1.0, 3.0])
    clock = Clock(now=lambda: next(time))
    with pytest.raises(ZeroDivisionError), clock.running("reset"):
        1 / 0  # noqa: B018
    assert clock.reset_wait_s == 2.0


def test_overlapping_spans_of_environments_count_once():
    now = 0.0
    clock = Clock(now=lambda: now)
    spans = [("generate", 0.0, 4.0), ("environment", 1.0, 2.0), ("environment", 1.0, 3.0), ("environment", 3.5, 9.0)]
    for what, start, now in spans:  # noqa: B007
        clock.add(what, start)
    assert (clock.generate_s, clock.overlap_s) == (4.0, 2.5)
