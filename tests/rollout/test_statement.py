"""`statement_spans` finds the sampled tokens from the statement that raised to the end of the code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.failures import FailureKind
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.code import extract_code
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.statement import line_start, statement_spans
from gvpo_trl.rollout.types import Step, StopReason, Trajectory
from tests.support.templates import byte_fallback_tokenizer, merging_tokenizer
from tests.support.tiny import tiny_tokenizer

TOKENIZERS = {
    "bytes": tiny_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "merges": merging_tokenizer(("Ċ", "p"), ("Ċ", "Ċ"), ("Ġ", "="), ("Ċ", "Ġ"), ("Ġ", "Ġ"), ("a", "Ċ"), ("`", "`")),
}


def step_of(tokenizer, text, failure=FailureKind.RUNTIME, **fields):
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    code = extract_code(chat.text(ids))
    return chat, Step(
        action_ids=ids,
        action_logprobs=None,
        bridge_ids=[],
        text=text,
        code=code and code.source,
        code_spans=chat.token_spans(ids, code) if code else (),
        observation="",
        failure=failure,
        **fields,
    )


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("```python\na = 1\nb = 2\nc = 3\n```", 2, ["b = 2\nc = 3"]),
        ("```python\na = 1\nb = 2\n```\nThen\n```python\nc = 3\nd = 4\n```", 2, ["b = 2", "c = 3\nd = 4"]),
        ("```python\na = 1\nb = 2\n```\nThen\n```python\nc = 3\nd = 4\n```", 4, ["d = 4"]),
        ("<think>\n```python\nx\n```\n</think>\n```python\nq = 1\nb = 2\n```", 2, ["b = 2"]),
        ("thought\n```python\nx\n```\n</think>\n```python\nq = 1\nb = 2\n```", 2, ["b = 2"]),
        ("1. Run\n   ```python\n   for x in y:\n       f(x)\n   ```", 2, ["f(x)"]),
        ("ü€😀\n```python\nx = '€'\ny = '😀é'\n```<|im_end|>", 2, ["y = '😀é'"]),
        ("```python\r\nq = 1\r\nb = 2\r\n```", 2, ["b = 2"]),
    ],
)
def test_the_code_from_a_line_on(tokenizer, text, line, expected):
    chat, step = step_of(tokenizer, text)
    spans = statement_spans(chat, step, line)
    decoded = [tokenizer.decode(step.action_ids[start:end]).strip("\r\n ") for start, end in spans]
    assert decoded == expected


@pytest.mark.parametrize("line", [None, 0, -1, 3, 10**9])
def test_a_line_that_is_none_of_the_code_marks_nothing(line):
    assert statement_spans(*step_of(TOKENIZERS["bytes"], "```python\na\nb\n```"), line) == ()


def test_a_turn_without_code_has_no_statement():
    assert statement_spans(*step_of(TOKENIZERS["bytes"], "No code."), 1) == ()


LINES = st.lists(st.text(st.sampled_from("ab= é€😀\t'"), min_size=1, max_size=8), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(
    blocks=st.lists(LINES, min_size=1, max_size=3),
    prose=st.text(st.sampled_from("ab é😀\n"), max_size=6),
    thinks=st.booleans(),
    chosen=st.integers(0, 20),
    name=st.sampled_from(sorted(TOKENIZERS)),
)
def test_the_span_covers_the_statement_and_nothing_before_its_line(blocks, prose, thinks, chosen, name):
    bodies = ["\n".join(["x", *lines]) for lines in blocks]
    text = ("<think>\n```python\nno\n```\n</think>\n" if thinks else "") + prose
    text += "".join(f"\n```python\n{body}\n```\n" for body in bodies)
    tokenizer = TOKENIZERS[name]
    chat, step = step_of(tokenizer, text)
    turn = chat.text(step.action_ids)
    code = extract_code(turn)
    line = 1 + chosen % len(code.source.split("\n"))
    start = line_start(turn, code, line)
    spans = statement_spans(chat, step, line)
    rest = [(max(begin, start), end) for begin, end in code.spans if end > start]
    assert len(spans) == len(rest)
    for (first, last), (begin, end) in zip(spans, rest, strict=True):
        before, covered = chat.text(step.action_ids[:first]), chat.text(step.action_ids[:last])
        assert len(before.rstrip("\ufffd")) <= begin, "the statement's first token is in the span"
        assert covered[:end] == turn[:end], "the span reaches the end of the code"
        token_end = len(chat.text(step.action_ids[: first + 1]))
        assert token_end > begin or turn[:begin].endswith("\ufffd"), "no whole token before the line is in the span"


def test_the_spans_reach_the_row():
    chat, step = step_of(TOKENIZERS["bytes"], "```python\na = 1\nb = 2\n```", statement_spans=())
    spans = statement_spans(chat, step, 2)
    located = step_of(TOKENIZERS["bytes"], step.text, statement_spans=spans)[1]
    for each, expected in ((located, "b = 2"), (step, "a = 1\nb = 2")):
        trajectory = Trajectory(
            task_id="t", messages=[], prompt_ids=[1], steps=[each], stop=StopReason.COMPLETED, score=None
        )
        row = pack(trajectory, filler_id=0, failure_span="statement")
        marked = [token for token, mark in zip(row.completion_ids, row.failed_mask, strict=True) if mark]
        assert chat.text(marked) == expected
