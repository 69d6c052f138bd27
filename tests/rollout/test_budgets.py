"""Truncation at any place: all lists of a row keep the same length and no budget is exceeded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.types import StopReason, Turn
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import ToyEnvironment

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
CHAT = Chat(TOKENIZER, [END])
PROMPT = [{"role": "user", "content": "Go."}]
PROMPT_LENGTH = len(CHAT.prompt_ids(PROMPT))

turns = st.sampled_from(
    [
        "```python\nx = 1\n```",
        "```python\nprint('é€😀' * 30)\n```",
        "```python\n1 / 0\n```",
        "```python\nx = (\n```",
        "```\ny = 2\n```\nand\n```\ndone()\n```",
        "é€😀",
        "Nothing to run.",
        "",
    ]
)
budgets = st.builds(
    Budgets,
    max_turns=st.integers(1, 5),
    max_turn_length=st.integers(1, 60),
    max_observation_length=st.integers(1, 80),
    max_completion_length=st.integers(1, 400),
    max_context_length=st.none() | st.integers(PROMPT_LENGTH + 1, PROMPT_LENGTH + 400),
    straggler_s=st.just(30.0),
)


@settings(max_examples=100, deadline=None)
@given(limits=budgets, scripts=st.lists(st.lists(turns, min_size=1, max_size=5), min_size=1, max_size=3))
def test_truncation_anywhere(limits, scripts):
    sampled = {row: [] for row in range(len(scripts))}

    def generate(requests):
        results = []
        for request in requests:
            check_request(request, sampled[request.trajectory], limits)
            script = scripts[request.trajectory]
            text = script[len(sampled[request.trajectory]) % len(script)] + "<|im_end|>"
            ids = TOKENIZER(text, add_special_tokens=False)["input_ids"][: request.max_new_tokens]
            sampled[request.trajectory].append(ids)
            results.append(Turn(ids=ids, logprobs=[-float(token) for token in ids]))
        return results

    loop = RolloutLoop(ToyEnvironment(max_episodes=2), CHAT, limits)
    trajectories = loop.run(["task"] * len(scripts), [PROMPT] * len(scripts), generate)
    for row, trajectory in enumerate(trajectories):
        assert [step.action_ids for step in trajectory.steps] == sampled[row]
        for span in ("turn", "code"):
            check_row(pack(trajectory, filler_id=END, failure_span=span), trajectory, limits)


def check_request(request, taken, limits):
    """Check that the request fits its budgets and holds every earlier turn as it was sampled."""
    assert 1 <= request.max_new_tokens <= limits.max_turn_length
    assert len(request.ids) + request.max_new_tokens <= PROMPT_LENGTH + limits.max_completion_length
    if limits.max_context_length is not None:
        assert len(request.ids) + request.max_new_tokens <= limits.max_context_length
    place = PROMPT_LENGTH
    for ids in taken:
        assert request.ids[place : place + len(ids)] == ids
        place += len(ids) + (ids[-1] != END)  # the template closes a turn that its budget cut
        assert request.ids[place - 1] == END
        place = request.ids.index(END, place) + len(TOKENIZER("\n<|im_start|>assistant\n")["input_ids"]) + 1
    assert len(request.ids) == place


def check_row(row, trajectory, limits):
    total = len(row.completion_ids)
    assert len(row.env_mask) == len(row.failed_mask) == len(row.logprobs) == total
    assert total <= limits.max_completion_length
    assert PROMPT_LENGTH + total <= (limits.max_context_length or 10**9)
    for token, mask, failed, logprob in zip(
        row.completion_ids, row.env_mask, row.failed_mask, row.logprobs, strict=True
    ):
        assert logprob == (-float(token) if mask else 0.0)
        assert failed <= mask
    assert sum(row.env_mask) == sum(len(step.action_ids) for step in trajectory.steps)
    assert row.env_mask[-1] == 1
    assert 1 <= len(trajectory.steps) <= limits.max_turns
    assert trajectory.stop in (StopReason.COMPLETED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS)
    if trajectory.stop is StopReason.MAX_TURNS:
        assert len(trajectory.steps) == limits.max_turns
