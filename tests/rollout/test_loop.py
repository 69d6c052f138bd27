"""The rollout loop with an environment in this process: what a trajectory holds, and when it ends."""

import threading
from dataclasses import replace

import pytest

from gvpo_trl.environments.base import Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.types import StopReason, Turn
from tests.support.rolling import DONE, END, GENEROUS_S, TOKENIZER, block, budgets, roll
from tests.support.templates import merging_tokenizer
from tests.support.tiny import CHATML, tiny_tokenizer
from tests.support.toy import Scripted, ToyEnvironment

# What the model sees and what it is trained on


def test_the_conversation_is_prompt_turns_and_observations():
    generate = Scripted(TOKENIZER, {0: [block("print(2 + 3)"), DONE]})
    (trajectory,) = roll([None], generate=generate)
    first, second = (TOKENIZER.decode(calls[0].ids) for calls in generate.calls)
    assert first == "<|im_start|>user\nTask 0.<|im_end|>\n<|im_start|>assistant\n"
    assert second == first + (
        "```python\nprint(2 + 3)\n```<|im_end|>\n<|im_start|>user\nOutput:\n```\n5\n\n```<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert trajectory.completion_messages == [
        {"role": "assistant", "content": block("print(2 + 3)")},
        {"role": "user", "content": "Output:\n```\n5\n\n```"},
        {"role": "assistant", "content": DONE},
    ]


def test_what_was_sampled_has_mask_1_and_everything_else_0():
    (trajectory,) = roll([[block("x = 1"), DONE]])
    row = pack(trajectory, filler_id=END)
    sampled = [token for token, mask in zip(row.completion_ids, row.env_mask, strict=True) if mask]
    rest = [token for token, mask in zip(row.completion_ids, row.env_mask, strict=True) if not mask]
    assert TOKENIZER.decode(sampled) == block("x = 1") + "<|im_end|>" + DONE + "<|im_end|>"
    assert TOKENIZER.decode(rest) == (
        "\n<|im_start|>user\nOutput:\n```\nExecution successful.\n```<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_closing_token_that_the_model_did_not_sample_has_mask_0():
    (trajectory,) = roll([["x" * 300, DONE]], max_turn_length=40)
    row = pack(trajectory, filler_id=END)
    assert row.env_mask[:41] == [1] * 40 + [0]
    assert row.completion_ids[40] == END


def test_sampled_ids_are_never_encoded_again():
    tokenizer = merging_tokenizer(("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"))
    sampled = [*tokenizer.convert_tokens_to_ids(["he", "llo"]), tokenizer.eos_token_id]
    seen = []

    def generate(requests):
        seen.append(list(requests[0].ids))
        return [Turn(ids=list(sampled))]

    (trajectory,) = roll([None], generate=generate, tokenizer=tokenizer, max_turns=3)
    prompt = len(trajectory.prompt_ids)
    assert trajectory.steps[0].text == "hello"
    assert seen[1][prompt : prompt + 3] == sampled
    row = pack(trajectory, filler_id=0)
    assert seen[2] == trajectory.prompt_ids + row.completion_ids[:-3]
    assert row.completion_ids[:3] == row.completion_ids[-3:] == sampled


def test_an_observation_is_cut_to_its_budget():
    (trajectory,) = roll([[block("print('x' * 5000)"), DONE]], max_observation_length=80)
    observation = trajectory.steps[0].observation
    assert "of about 5001 tokens left out" in observation
    assert len(TOKENIZER(observation)["input_ids"]) == 80 + len("Output:\n```\n\n```")


def test_an_observation_template_may_hold_braces():
    (trajectory,) = roll([[block("print('{x}')"), DONE]], observation_template='{"output": {observation}}')
    assert trajectory.steps[0].observation == '{"output": {x}\n}'


STRANGE = [
    "lone \ud800 surrogate",
    "\udfff",
    "null \0 byte",
    "\x1b]52;c;!\x07\x9b2J\u202e\r\ufeff",
    "<|im_end|>\udc80<|im_end|>",
]


@pytest.mark.parametrize("text", STRANGE)
def test_a_strange_observation_is_spelled_out_and_changes_no_other_row(text):
    environment = ToyEnvironment(score=lambda space: Score(passed=(text,), failed=(text,)))
    opening = environment.open

    def open_episode(task_id):
        episode = opening(task_id)
        if task_id == "task_1":
            step = episode.step
            episode.step = lambda code: replace(step(code), text=text, api_calls=(text,))
        return episode

    environment.open = open_episode
    scripts = [[block("x = 1"), DONE]] * 3
    trajectories, plain = roll(scripts, environment), roll(scripts)
    spelled = text.encode("utf-8", "backslashreplace").decode()
    first = trajectories[1].steps[0]
    assert first.observation == f"Output:\n```\n{spelled}\n```"
    assert (first.api_calls, trajectories[1].score.passed) == ((spelled,), (spelled,))
    assert spelled in TOKENIZER.decode(first.bridge_ids)
    assert first.bridge_ids.count(END) == 1
    for row in (0, 2):
        assert trajectories[row].steps[0].bridge_ids == plain[row].steps[0].bridge_ids
    assert [trajectory.retries for trajectory in trajectories] == [0, 0, 0]


def test_the_message_of_a_fault_is_spelled_out():
    def faults(number, place):
        raise EpisodeFault("broke \ud800")

    (lost,) = roll([[DONE]], ToyEnvironment(faults=faults))
    assert lost.fault == "episode: broke \\ud800"


def test_each_row_has_the_date_of_its_task():
    tokenizer = tiny_tokenizer("{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    generate = Scripted(tokenizer, {0: [DONE], 1: [DONE]})
    loop = RolloutLoop(ToyEnvironment(), Chat(tokenizer, [END]), budgets())
    prompts = [[{"role": "user", "content": "Go."}]] * 2
    trajectories = loop.run(["a", "b"], prompts, generate, dates=["2021-03-04T05:06:07", None])
    dates = [tokenizer.decode(trajectory.prompt_ids)[:10] for trajectory in trajectories]
    assert dates == ["2021-03-04", "2023-05-18"]


# Verdicts


def test_failures_are_the_interpreters_verdicts():
    script = [block("x = ("), block("1 / 0"), "I think.", block('print("Execution failed.")'), DONE]
    (trajectory,) = roll([script])
    assert [step.failure for step in trajectory.steps] == [
        FailureKind.SYNTAX,
        FailureKind.RUNTIME,
        FailureKind.NO_CODE,
        None,
        None,
    ]
    assert [step.code for step in trajectory.steps[1:4]] == ["1 / 0", None, 'print("Execution failed.")']


def test_a_turn_without_code_may_count_as_no_failure():
    (trajectory,) = roll([["I think.", DONE]], no_code_is_failure=False)
    assert [step.failure for step in trajectory.steps] == [None, None]


def test_failed_tokens_are_those_of_the_failed_turn_or_its_code():
    (trajectory,) = roll([["Try.\n" + block("1 / 0"), DONE]])
    for span, marked in (("turn", "Try.\n```python\n1 / 0\n```<|im_end|>"), ("code", "1 / 0")):
        row = pack(trajectory, filler_id=END, failure_span=span)
        failed = [token for token, mark in zip(row.completion_ids, row.failed_mask, strict=True) if mark]
        assert TOKENIZER.decode(failed) == marked


def test_a_model_that_never_writes_code_stops_at_max_turns_with_every_turn_failed():
    (trajectory,) = roll([["Let me think."]], max_turns=4)
    assert trajectory.stop is StopReason.MAX_TURNS
    assert [step.failure for step in trajectory.steps] == [FailureKind.NO_CODE] * 4
    assert trajectory.reward == 0.0
    assert "No code was found" in trajectory.steps[0].observation


# The end


def test_completion_ends_the_trajectory_and_it_is_scored():
    (trajectory,) = roll([[block("x = 1"), DONE, block("never = 1")]])
    assert (trajectory.stop, len(trajectory.steps), trajectory.reward) == (StopReason.COMPLETED, 2, 0.5)
    assert trajectory.steps[-1].bridge_ids == []


def test_max_turns():
    (trajectory,) = roll([[block("ok = 1")]], max_turns=3)
    assert (trajectory.stop, len(trajectory.steps), trajectory.reward) == (StopReason.MAX_TURNS, 3, 0.5)
    assert trajectory.stop.is_truncated
    assert pack(trajectory, filler_id=0).completion_ids[-1] == END


BRIDGE = len("\nuserOutput:\n```\nExecution successful.\n```\nassistant\n\n") + 3
"""Tokens between two turns whose code prints nothing."""


@pytest.mark.parametrize("limit", ["max_completion_length", "max_context_length"])
def test_max_tokens_stops_where_the_next_turn_would_have_no_room(limit):
    turn = len(block("ok = 1")) + 1
    prompt = len("user\nTask 0.\nassistant\n") + 3
    base = prompt if limit == "max_context_length" else 0
    exact, one_less = (roll([[block("ok = 1")]], **{limit: base + turn + BRIDGE + room})[0] for room in (1, 0))
    assert [len(step.action_ids) for step in exact.steps] == [turn, 1]
    assert [len(step.action_ids) for step in one_less.steps] == [turn]
    for trajectory in (exact, one_less):
        assert (trajectory.stop, trajectory.reward) == (StopReason.MAX_TOKENS, 0.5)
        assert trajectory.steps[-1].bridge_ids == []


def test_completion_comes_before_a_spent_budget():
    (trajectory,) = roll([[DONE]], max_turns=1, max_completion_length=len(DONE) + 1)
    assert trajectory.stop is StopReason.COMPLETED


def test_an_agent_that_ends_its_interpreter_ends_the_trajectory_and_is_scored():
    environment = ToyEnvironment()
    opening = environment.open

    def open_episode(task_id):
        episode = opening(task_id)
        episode.step = lambda code: StepResult(text="exited", failure=FailureKind.EXITED, ended=True)
        return episode

    environment.open = open_episode
    (trajectory,) = roll([[block("import os; os._exit(1)")]], environment)
    assert (trajectory.stop, trajectory.reward) == (StopReason.AGENT_EXITED, 0.0)
    assert [step.failure for step in trajectory.steps] == [FailureKind.EXITED]


def test_a_prompt_that_fills_the_context_is_an_error_before_anything_opens():
    environment = ToyEnvironment()
    with pytest.raises(ValueError, match=r"task_0 has 26 tokens.*max_context_length=26"):
        roll([[DONE]], environment, max_context_length=26)
    assert environment.opened == []


# Together


def test_all_episodes_of_a_batch_step_at_the_same_time():
    barrier = threading.Barrier(4)
    environment = ToyEnvironment(faults=lambda n, place: place == "step" and barrier.wait(GENEROUS_S))
    trajectories = roll([[block("x = 1"), DONE]] * 4, environment, straggler_s=GENEROUS_S)
    assert [trajectory.reward for trajectory in trajectories] == [0.5] * 4


def test_all_worlds_open_at_the_same_time_and_while_the_first_turn_is_sampled():
    barrier = threading.Barrier(5)
    environment = ToyEnvironment(faults=lambda n, place: place == "open" and barrier.wait(GENEROUS_S))
    script = Scripted(TOKENIZER, dict(enumerate([[DONE]] * 4)))

    def generate(requests):
        barrier.wait(GENEROUS_S)
        return script(requests)

    assert len(roll([None] * 4, environment, generate=generate)) == 4


@pytest.mark.parametrize("max_episodes", [8, 2])
def test_one_slow_step_does_not_hold_up_the_others(max_episodes):
    """The first step of row 0 ends only after all other rows, also those that wait for an episode, were scored."""
    others_scored, lock = [], threading.Lock()
    released = threading.Event()
    environment = ToyEnvironment(max_episodes)

    def faults(number, place):
        task = environment.opened[number].reset.task_id if place != "open" else None
        if place == "step" and task == "task_0":
            assert released.wait(GENEROUS_S), "the others wait for the slow step"
        if place == "score" and task != "task_0":
            with lock:
                others_scored.append(task)
                if len(others_scored) == 7:
                    released.set()

    environment.faults = faults
    trajectories = roll([[block("x = 1"), block("y = 2"), DONE]] * 8, environment)
    assert [(t.stop, len(t.steps), t.reward) for t in trajectories] == [(StopReason.COMPLETED, 3, 0.5)] * 8


@pytest.mark.parametrize("max_episodes", [1, 3])
def test_max_episodes_bounds_what_is_open_and_every_row_finishes_in_its_place(max_episodes):
    environment = ToyEnvironment(max_episodes)
    scripts = [[block(f"print({row})")] * (row % 3) + [DONE] for row in range(7)]
    trajectories = roll(scripts, environment)
    assert environment.most_live <= max_episodes
    assert [t.task_id for t in trajectories] == [f"task_{row}" for row in range(7)]
    assert [len(t.steps) for t in trajectories] == [1, 2, 3, 1, 2, 3, 1]
    assert [t.steps[0].observation for t in trajectories if len(t.steps) > 1] == [
        f"Output:\n```\n{row}\n\n```" for row in (1, 2, 4, 5)
    ]


def test_no_rows_give_no_trajectories():
    assert roll([]) == []


def test_scores_of_an_untouched_and_of_a_solved_world():
    environment = ToyEnvironment(score=lambda space: Score(passed=("a", "b")[: space.get("ok", 0)], failed=()))
    solved, untouched = roll([[block("ok = 2\ndone()")], [block("done()")]], environment)
    assert (solved.reward, solved.score.success) == (1.0, True)
    assert (untouched.reward, untouched.score.success) == (0.0, False)
