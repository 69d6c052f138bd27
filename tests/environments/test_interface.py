"""A mistake in a user's environment is named when the trainer is constructed, together with its remedy."""

import sqlite3

import pytest

from gvpo_trl import MultiTurnRollout
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.environments.interface import try_environment
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault, SetupError
from tests.support.rolling import DONE, roll
from tests.support.toy import ToyEnvironment
from tests.support.training import make_trainer


class Episode:
    """A correct episode, of which each case breaks one thing."""

    def __init__(self, task_id):
        self.reset = ResetResult(task_id=task_id, seconds=0.0)
        self.steps, self.closed = [], 0

    def step(self, code):
        self.steps.append(code)
        return StepResult(text="", failure=None)

    def score(self):
        return Score(passed=("a",), failed=())

    def close(self):
        self.closed += 1


class Environment:
    """A correct environment, of which each case breaks one thing."""

    max_episodes = 2
    episode = Episode

    def __init__(self):
        self.opened = []

    def open(self, task_id):
        self.opened.append(self.episode(task_id))
        return self.opened[-1]

    def close(self):
        pass


def environment(**changes):
    return type("Mine", (Environment,), changes)()


def with_episode(**changes):
    return environment(episode=type("MyEpisode", (Episode,), changes))


def returning(value):
    return lambda self, *arguments: value


async def awaited(self, *arguments):
    pass


def raising(error):
    def method(self, *arguments):
        raise error

    return method


def in_sqlite(self, task_id):
    Episode.__init__(self, task_id)
    self.base = sqlite3.connect(":memory:")


BROKEN = {
    "no open": (environment(open=None), r"Mine has no method 'open'; add `def open\(self, task_id\)`"),
    "no close": (environment(close=None), r"Mine has no method 'close'; add `def close\(self\)`"),
    "open without a task": (
        environment(open=lambda self: None),
        r"Mine\.open\(\) cannot be called with \(task_id\): .*; write `def open\(self, task_id\)`",
    ),
    "open with a seed": (
        environment(open=lambda self, task_id, seed: None),
        r"Mine\.open\(task_id, seed\) cannot be called with \(task_id\): missing a required argument: 'seed'",
    ),
    "async open": (environment(open=awaited), r"Mine\.open is `async def`; .* that blocks"),
    "a class": (Environment, r"the environment is the class Environment; pass an instance, such as Environment\(\)"),
    "no limit": (environment(max_episodes=None), r"Mine\.max_episodes is None; set it to the number of episodes"),
    "limit of 0": (environment(max_episodes=0), r"Mine\.max_episodes is 0; .* at least 1"),
    "prefetch without tasks": (environment(prefetch=lambda self: None), r"Mine\.prefetch\(\) cannot be called"),
    "open returns nothing": (environment(open=returning(None)), r"Mine\.open returned None; return the episode"),
    "open returns text": (environment(open=returning("hello")), r"str has no method 'step'"),
    "open returns an awaitable": (
        environment(open=lambda self, task_id: awaited(self)),
        r"Mine\.open returned <coroutine .*does not await",
    ),
    "open raises": (environment(open=raising(KeyError("t"))), r"Mine\.open\('task'\) raised KeyError: 't'\. Return a"),
    "no step": (with_episode(step=None), r"MyEpisode has no method 'step'; add `def step\(self, code\)`"),
    "step without code": (with_episode(step=lambda self: None), r"MyEpisode\.step\(\) cannot be called with \(code\)"),
    "async step": (with_episode(step=awaited), r"MyEpisode\.step is `async def`"),
    "no reset": (with_episode(__init__=returning(None)), r"MyEpisode\.reset is None .*set self\.reset = ResetResult"),
    "step returns text": (
        with_episode(step=returning("42")),
        r"MyEpisode\.step returned '42' \(str\); return StepResult\(text=…, failure=…\)",
    ),
    "step returns a pair": (with_episode(step=returning(("42", None))), r"returned \('42', None\) \(tuple\)"),
    "step without text": (
        with_episode(step=returning(StepResult(text=42, failure=None))),
        r"MyEpisode\.step returned text=42 \(int\); give the agent a str",
    ),
    "step with a flag": (
        with_episode(step=returning(StepResult(text="", failure=True))),
        r"MyEpisode\.step returned failure=True \(bool\); use None or a FailureKind: syntax, runtime, api",
    ),
    "step lets the agent's error out": (
        with_episode(step=lambda self, code: exec(code)),
        r"MyEpisode\.step returned None|MyEpisode\.step\('1 / 0'\) raised ZeroDivisionError",
    ),
    "step in another thread": (
        with_episode(__init__=in_sqlite, step=lambda self, code: self.base.execute("select 1")),
        r"step\('print\(1\)'\) raised ProgrammingError: SQLite objects created in a thread .* in another thread",
    ),
    "score returns a number": (
        with_episode(score=returning(1.0)),
        r"MyEpisode\.score returned 1\.0 \(float\); return Score\(passed=\(…\), failed=\(…\)\)",
    ),
    "score of counts": (
        with_episode(score=returning(Score(passed=2, failed=1))),
        r"MyEpisode\.score returned passed=2 \(int\); give a tuple",
    ),
    "score of a text": (
        with_episode(score=returning(Score(passed=("a",), failed="b"))),
        r"MyEpisode\.score returned failed='b' \(str\); give a tuple",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_mistake_is_named_with_its_remedy(case):
    env, message = BROKEN[case]
    with pytest.raises(SetupError, match=message):
        try_environment(env, "task")


def test_a_correct_environment_is_tried_once_and_closed():
    env = Environment()
    try_environment(env, "task")
    (episode,) = env.opened
    assert episode.reset.task_id == "task" and len(episode.steps) == 2 and episode.closed == 1


def test_an_environment_that_says_so_is_not_tried():
    env = environment(is_checked=True)
    try_environment(env, "task")
    assert env.opened == []
    with pytest.raises(SetupError, match="max_episodes"):
        try_environment(environment(is_checked=True, max_episodes=-1), "task")


def test_a_fault_of_the_trial_is_only_logged(caplog):
    try_environment(with_episode(step=raising(EpisodeFault("gone"))), "task")
    assert "A trial episode of Mine met a fault (episode): gone" in caplog.text


@pytest.mark.parametrize("case", ["no close", "step returns text"])
def test_the_trainer_names_it_before_it_loads_a_model(case, tmp_path):
    env, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, model="no/such-model", rollout_func=MultiTurnRollout(env))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("step", None, r"returned None \(NoneType\); return StepResult"),
        ("step", StepResult(text="", failure="odd"), r"failure='odd' \(str\); use None or a FailureKind"),
        ("score", Score(passed=("a",), failed="b"), r"failed='b' \(str\)"),
    ],
)
def test_a_mistake_of_a_later_result_is_named_in_the_rollout(place, value, message):
    """Only an episode's later calls return it, so that a trial has not found it."""
    toys = ToyEnvironment()
    opening = toys.open

    def open_broken(task_id):
        episode = opening(task_id)
        setattr(episode, place, lambda *arguments: value)
        return episode

    toys.open = open_broken
    with pytest.raises(SetupError, match=message):
        roll([[DONE]], toys)
    assert FailureKind.RUNTIME == "runtime", "a plain name of a kind is a kind"
