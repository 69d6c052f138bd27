"""Rollouts of scripted turns in an environment that runs in this process."""

import threading

from gvpo_trl.faults import EpisodeFault
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import Scripted, ToyEnvironment

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
GENEROUS_S = 30
"""How long a test waits, in seconds, for something that should come at once. Only a failing test waits that long."""


def block(code):
    return f"```python\n{code}\n```"


DONE = block("ok = 1\ndone()")


def budgets(**changes):
    values = {
        "max_turns": 5,
        "max_turn_length": 200,
        "max_observation_length": 100,
        "max_completion_length": 5000,
        "straggler_s": 0.05,
    }
    return Budgets(**(values | changes))


def roll(scripts, environment=None, generate=None, tokenizer=TOKENIZER, **changes):
    """Roll out one trajectory per script and return the trajectories."""
    environment = environment or ToyEnvironment()
    loop = RolloutLoop(environment, Chat(tokenizer, [tokenizer.eos_token_id]), budgets(**changes))
    prompts = [[{"role": "user", "content": f"Task {row}."}] for row in range(len(scripts))]
    generate = generate or Scripted(tokenizer, dict(enumerate(scripts)))
    trajectories = loop.run([f"task_{row}" for row in range(len(scripts))], prompts, generate)
    assert environment.live == 0
    assert all(episode is None or episode.closed for episode in environment.opened)
    return trajectories


def failing(*places, times=1, kind=EpisodeFault, task="task_0"):
    """Return an environment whose first `times` episodes of a task raise a fault at the given places."""
    environment = ToyEnvironment()
    broken, lock, opening = set(), threading.Lock(), environment.open

    def open_episode(task_id):
        current.task = task_id
        return opening(task_id)

    current = threading.local()
    environment.open = open_episode

    def faults(number, place):
        if place not in places:
            return
        name = current.task if place == "open" else environment.opened[number].reset.task_id
        with lock:
            if name == task and (number in broken or len(broken) < times):
                broken.add(number)
                raise kind(f"{place} of episode {number}")

    environment.faults = faults
    return environment
