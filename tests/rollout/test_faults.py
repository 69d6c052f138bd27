"""After a fault of our machinery the trajectory starts again once, then it is unscorable; every episode is closed."""

import pytest

from gvpo_trl.faults import EnvironmentsExhausted, EpisodeFault, EvaluatorFault, SetupError
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.types import StopReason
from tests.support.rolling import DONE, END, TOKENIZER, block, failing, roll
from tests.support.toy import Scripted, ToyEnvironment


@pytest.mark.parametrize("place", ["open", "step", "score"])
def test_one_fault_starts_the_trajectory_again_on_a_fresh_episode(place):
    environment = failing(place)
    count = block("ok = globals().get('ok', 0) + 1")
    lost = [count, block("done()")] if place == "score" else [count]  # the turns before the fault
    generate = Scripted(TOKENIZER, {0: [*lost, count, block("done()")], 1: [DONE], 2: [DONE]})
    trajectories = roll([None] * 3, environment, generate=generate)
    assert [t.retries for t in trajectories] == [1, 0, 0]
    assert [t.reward for t in trajectories] == [0.5] * 3, "a world that lived on would have counted twice"
    assert trajectories[0].stop is StopReason.COMPLETED
    assert place in trajectories[0].fault
    assert len(environment.opened) == 4
    retried = [call[0] for call in generate.calls if call[0].trajectory == 0]
    assert sum(request.ids == trajectories[0].prompt_ids for request in retried) == 2


@pytest.mark.parametrize("kind", [EpisodeFault, EvaluatorFault])
@pytest.mark.parametrize("place", ["open", "step", "score"])
def test_two_faults_make_the_row_unscorable_and_leave_the_group_its_size(place, kind):
    trajectories = roll([[block("1 / 0"), DONE] * 2] * 4, failing(place, times=2, kind=kind))
    lost, *others = trajectories
    assert (lost.stop, lost.score, lost.reward, lost.retries) == (StopReason.ENVIRONMENT_LOST, None, None, 1)
    assert lost.fault.startswith(f"{kind.boundary}: {place}")
    assert [(t.stop, t.reward, t.retries, t.fault) for t in others] == [(StopReason.COMPLETED, 0.5, 0, None)] * 3


def test_the_agent_never_sees_a_fault_and_gets_no_failure_from_it():
    (lost,) = roll([[block("x = 1"), DONE] * 2], failing("score", times=2))
    assert [step.failure for step in lost.steps] == [None, None]
    assert "episode" not in " ".join(step.observation for step in lost.steps)


def test_an_environment_lost_in_its_second_step_leaves_a_row_that_does_not_end_on_an_observation():
    environment = ToyEnvironment()
    steps = {}

    def faults(number, place):
        if place == "step":
            steps[number] = steps.get(number, 0) + 1
            if steps[number] == 2:
                raise EpisodeFault("gone")

    environment.faults = faults
    (lost,) = roll([[block("1 / 0"), DONE] * 2], environment)
    assert (lost.stop, len(lost.steps), lost.steps[0].bridge_ids) == (StopReason.ENVIRONMENT_LOST, 1, [])
    assert pack(lost, filler_id=0).completion_ids[-1] == END


def test_no_retry_when_none_is_allowed():
    environment = failing("step")
    (lost,) = roll([[DONE]], environment, max_retries=0)
    assert (lost.stop, len(environment.opened)) == (StopReason.ENVIRONMENT_LOST, 1)


def stopped(environment, error, *, generate=None, rows=4):
    """Return the error that ends the rollout, after checking that every opened episode was closed."""
    scripts = [[block("x = 1"), DONE]] * rows
    with pytest.raises(error) as caught:
        roll(scripts, environment, generate=generate)
    assert environment.live == 0
    assert all(episode.closed for episode in environment.opened if episode is not None)
    return caught.value


@pytest.mark.parametrize("place", ["open", "step", "score"])
def test_exhausted_environments_stop_the_rollout_after_closing_every_episode(place):
    error = stopped(failing(place, kind=EnvironmentsExhausted, task="task_2"), EnvironmentsExhausted)
    assert place in str(error)


def test_a_mistake_in_the_set_up_is_not_retried():
    environment = failing("open", kind=SetupError, task="task_2")
    stopped(environment, SetupError)
    assert len(environment.opened) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", [1, 2])
def test_an_exception_out_of_the_generator_closes_every_episode(error, call):
    script = Scripted(TOKENIZER, dict(enumerate([[block("x = 1"), DONE]] * 4)))

    def generate(requests):
        if len(script.calls) + 1 == call:
            raise error("stop")
        return script(requests)

    stopped(ToyEnvironment(), error, generate=generate)


def test_an_unknown_exception_of_a_step_stops_the_rollout():
    stopped(failing("step", kind=ZeroDivisionError), ZeroDivisionError)


def unclosable(task):
    """Return an environment in which closing an episode of the task closes it and then raises."""
    environment = ToyEnvironment()
    opening = environment.open

    def open_episode(task_id):
        episode = opening(task_id)
        closing = episode.close

        def close():
            closing()
            raise EpisodeFault("cannot close")

        if task_id == task:
            episode.close = close
        return episode

    environment.open = open_episode
    return environment


def test_an_episode_that_cannot_be_closed_does_not_keep_the_others_open():
    def generate(requests):
        raise RuntimeError("stop")

    assert str(stopped(unclosable("task_0"), RuntimeError, generate=generate)) == "stop"


def test_an_episode_that_cannot_be_closed_keeps_its_score():
    trajectories = roll([[block("1 / 0"), DONE]] * 2, unclosable("task_0"))
    assert [(t.reward, t.retries, t.stop) for t in trajectories] == [(0.5, 0, StopReason.COMPLETED)] * 2
