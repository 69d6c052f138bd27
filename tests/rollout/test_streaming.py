"""With a streaming generator no trajectory waits for the slowest turn or the slowest interpreter of another."""

import threading

import pytest

from gvpo_trl.faults import EnvironmentsExhausted
from gvpo_trl.rollout.types import Generate, StopReason, StreamingGenerate
from tests.support.rolling import DONE, END, GENEROUS_S, TOKENIZER, block, failing, roll
from tests.support.streaming import Stepped, Threaded, scripted
from tests.support.toy import Scripted, ToyEnvironment

SCRIPTS = [[block(f"x = {row}"), block("print(x)"), DONE] for row in range(4)]


def outcome(trajectory):
    steps = [(step.action_ids, step.bridge_ids, step.observation, step.failure) for step in trajectory.steps]
    return trajectory.task_id, trajectory.stop, trajectory.reward, trajectory.retries, steps


def test_the_loop_tells_the_two_protocols_apart():
    generate = scripted(TOKENIZER, SCRIPTS)
    assert isinstance(Stepped(generate), StreamingGenerate)
    assert not isinstance(generate, StreamingGenerate)
    assert callable(generate) and Generate is not StreamingGenerate


def test_the_slowest_interpreter_holds_nobody_up():
    environment, gate = ToyEnvironment(), threading.Event()

    def faults(number, place):
        if place == "step" and environment.opened[number].reset.task_id == "task_2":
            assert gate.wait(GENEROUS_S)

    environment.faults = faults
    generate = Stepped(scripted(TOKENIZER, SCRIPTS))
    submit = generate.submit

    def counting(request):
        if [asked.trajectory for asked in generate.asked].count(3) == 2:  # the turn is row 3's last one
            gate.set()
        return submit(request)

    generate.submit = counting
    roll(SCRIPTS, environment, generate, straggler_s=GENEROUS_S)
    rows = [request.trajectory for request in generate.asked]
    assert rows.count(2) == 3
    assert 2 not in rows[4 : rows.index(2, 4)]
    assert rows.index(2, 4) >= 4 + 2  # the others went on before its first code had run


def test_the_slowest_turn_holds_nobody_up():
    def first(flying):  # The turns of row 1 end after all others.
        others = [place for place, request in enumerate(flying) if request.trajectory != 1]
        if others:
            return others[0]
        asked = [request.trajectory for request in generate.asked]
        return 0 if all(asked.count(row) == 3 for row in (0, 2, 3)) else None

    generate = Stepped(scripted(TOKENIZER, SCRIPTS), first=first)
    trajectories = roll(SCRIPTS, generate=generate, max_turns=3)
    rows = [request.trajectory for request in generate.asked]
    assert rows[-2:] == [1, 1]
    assert [len(trajectory.steps) for trajectory in trajectories] == [3] * 4


@pytest.mark.parametrize("max_episodes", [1, 3, 16])
@pytest.mark.parametrize("way", [Stepped, Threaded])
def test_trajectories_are_those_of_batches(way, max_episodes):
    scripts = [[block("x = 1")] * length + [block("1 / 0"), "No code.", DONE] for length in (0, 3, 1, 2, 0, 1)]
    streamed = roll(scripts, ToyEnvironment(max_episodes=max_episodes), way(scripted(TOKENIZER, scripts)), max_turns=5)
    in_batches = roll(scripts, ToyEnvironment(max_episodes=max_episodes), max_turns=5)
    assert [outcome(trajectory) for trajectory in streamed] == [outcome(trajectory) for trajectory in in_batches]


def test_one_request_a_trajectory_is_in_flight_and_holds_its_ids():
    generate = Stepped(scripted(TOKENIZER, SCRIPTS))
    submit, most = generate.submit, []

    def checked(request):
        most.append(request.trajectory in [flying.trajectory for flying, _ in generate.flying])
        return submit(request)

    generate.submit = checked
    (trajectory, *_) = roll(SCRIPTS, generate=generate)
    assert not any(most)
    ids = list(trajectory.prompt_ids)
    for request, step in zip([r for r in generate.asked if r.trajectory == 0], trajectory.steps, strict=True):
        assert request.ids == ids
        ids += step.action_ids + step.bridge_ids


def test_a_request_that_fails_starts_its_trajectory_again():
    failed = []

    def refuse(request):
        second = len(request.ids) > 40 and request.trajectory == 1
        if second and not failed:
            failed.append(request)
            return True
        return False

    environment = ToyEnvironment()
    scripts = [SCRIPTS[0], [*SCRIPTS[1][:1], *SCRIPTS[1]], SCRIPTS[2]]
    generate = Stepped(scripted(TOKENIZER, scripts), refuse=refuse)
    trajectories = roll(scripts, environment, generate)
    assert [trajectory.retries for trajectory in trajectories] == [0, 1, 0]
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.COMPLETED}
    assert trajectories[1].fault == "generation: refused"
    assert len(environment.opened) == 4


def test_a_request_that_fails_twice_leaves_its_row_unscorable_and_no_other():
    generate = Stepped(scripted(TOKENIZER, SCRIPTS), refuse=lambda request: request.trajectory == 1)
    trajectories = roll(SCRIPTS, generate=generate)
    assert [trajectory.reward for trajectory in trajectories] == [0.5, None, 0.5, 0.5]
    assert trajectories[1].stop is StopReason.ENVIRONMENT_LOST
    assert [request.trajectory for request in generate.asked].count(1) == 2


@pytest.mark.parametrize("place", ["open", "step", "score"])
def test_a_lost_environment_starts_again(place):
    trajectories = roll(SCRIPTS, failing(place), Stepped(scripted(TOKENIZER, [s * 2 for s in SCRIPTS])), max_turns=8)
    assert [trajectory.retries for trajectory in trajectories] == [1, 0, 0, 0]


@pytest.mark.parametrize("way", [Stepped, Threaded])
def test_what_a_generator_raises_ends_the_rollout_and_closes_every_episode(way):
    class Broken(Scripted):
        def __call__(self, requests):
            if len(self.calls) == 5:
                raise RuntimeError("engine dead")
            return super().__call__(requests)

    environment = ToyEnvironment()
    with pytest.raises(RuntimeError, match="engine dead"):
        roll(SCRIPTS, environment, way(Broken(TOKENIZER, dict(enumerate(SCRIPTS)))))
    assert environment.live == 0


def test_an_exhausted_environment_ends_the_rollout():
    environment = failing("step", kind=EnvironmentsExhausted)
    with pytest.raises(EnvironmentsExhausted):
        roll(SCRIPTS, environment, Stepped(scripted(TOKENIZER, SCRIPTS)))
    assert environment.live == 0


def test_a_turn_over_its_budget_is_our_mistake():
    class TooLong(Scripted):
        def __call__(self, requests):
            (turn,) = super().__call__(requests)
            turn.ids.extend([END] * 300)
            return [turn]

    with pytest.raises(AssertionError, match="over its budget"):
        roll(SCRIPTS, generate=Stepped(TooLong(TOKENIZER, dict(enumerate(SCRIPTS)))))
