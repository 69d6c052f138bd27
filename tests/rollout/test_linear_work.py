"""The work over sampled and environment text grows linearly, whatever the text.

Twice the text may take little more than twice the operations. Lines of Python and the tokenizer's characters and ids
are counted. Regular expressions and methods of strings do their work inside one line, so processor time is compared
as well, between texts of which one is eight times as long: quadratic work takes 64 times as long.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.code import extract_code
from gvpo_trl.rollout.statement import statement_spans
from gvpo_trl.rollout.types import Step
from tests.support.growth import cpu_growth, lines_run
from tests.support.templates import CountingTokenizer, byte_fallback_tokenizer, merging_tokenizer
from tests.support.tiny import tiny_tokenizer

OPEN = "```python\n"
HOSTILE = {
    "spaces behind a fence": ("```", " ", "x y"),
    "spaces": ("", " ", ""),
    "spaces before a fence": ("", " ", "```python\nx\n```"),
    "tabs": (OPEN, "\t", "\n```"),
    "newlines": (OPEN, "\n", "x"),
    "carriage returns": (OPEN, "\r", "\n```"),
    "carriage returns and newlines": (OPEN, "\r\n", "x\r\n```"),
    "backticks": ("", "`", ""),
    "backticks before text": ("", "`", "x"),
    "backticks in groups": ("", "``` ", "x"),
    "tildes": ("", "~", "x"),
    "backticks and tildes": ("", "```~~~", ""),
    "bare fences": ("", "```\n", ""),
    "tilde fences": ("", "~~~\n", "```"),
    "fences in a block": (OPEN, "```python\n", "```"),
    "blocks": ("", "```python\nx\n```\n", ""),
    "bare blocks": ("", "```\nx\n```\n", ""),
    "fences behind text": ("", "x ```python\n", ""),
    "fences behind code": (OPEN, "x```\n", ""),
    "fences behind comments": (OPEN, "# ```\n", ""),
    "thoughts": ("", "<think>", ""),
    "thoughts that end": ("", "<think></think>", "```python\nx"),
    "fences in thoughts": ("", "<think>\n```python\n", ""),
    "single quotes": (OPEN, "'", "\n```"),
    "double quotes": (OPEN, '"', "\n```\n"),
    "strings over lines": (OPEN, "'''\n```\n", ""),
    "open strings": ("", "```python\n'''\n```\n", ""),
    "open strings that nothing closes": ("", "```python\n\\'''\n```\n", ""),
    "fences in an open string": (OPEN + "'''\n", "```\n", ""),
    "backslashes": (OPEN + "'", "\\", "\n```"),
    "continued strings": (OPEN + "'", "\\\n```\\\n", ""),
    "brackets": (OPEN, "([{", "\n```"),
    "words": (OPEN, "a ", "\n```"),
    "a word": (OPEN, "a", "\n```"),
    "ends of code": (OPEN, "<end_code>\n", ""),
    "control strings": ("", "<|im_end|>", ""),
    "halves of control strings": ("", "<|im_", "end|>"),
    "characters of four bytes": (OPEN + "x\n```\n", "😀", ""),
}


def text_of(parts, length):
    head, unit, tail = parts
    return head + unit * (length // len(unit)) + tail


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_extracting_code_takes_linear_work(parts):
    small, large = (lines_run(lambda: extract_code(text_of(parts, length))) for length in (4_000, 8_000))  # noqa: B023
    assert large <= 2.2 * small + 200
    assert cpu_growth(extract_code, text_of(parts, 4_000), text_of(parts, 32_000)) < 24


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*(st.text(st.sampled_from("`~<>/'\"\\ \t\n\r#x([{"), max_size=8) for _ in "hut")),
    st.sampled_from(["", OPEN, OPEN + "'''\n", "```\n", "<think>"]),
)
def test_extracting_code_takes_linear_work_for_any_repeated_text(parts, start):
    head, unit, tail = parts
    texts = [start + head + (unit or "`") * count + tail for count in (300, 600)]
    small, large = (lines_run(lambda: extract_code(text)) for text in texts)  # noqa: B023
    assert large <= 2.2 * small + 400


class Work:
    """Counts the characters, ids and calls with which a chat uses its tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = CountingTokenizer(tokenizer)
        self.chat = Chat(self.tokenizer, [tokenizer.eos_token_id])

    def count(self, call):
        self.tokenizer.encoded = self.tokenizer.decoded = self.tokenizer.calls = 0
        call(self.chat)
        return self.tokenizer.encoded + self.tokenizer.decoded + self.tokenizer.calls


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("what", ["prompt", "bridge", "cut"])
def test_encoding_takes_linear_work(parts, what):
    calls = {
        "prompt": lambda chat, text: chat.prompt_ids([{"role": "user", "content": text}]),
        "bridge": lambda chat, text: chat.bridge([], text),
        "cut": lambda chat, text: chat.cut(text, 50),
    }
    work = Work(tiny_tokenizer())
    texts = [text_of(parts, length) for length in (2_000, 4_000)]
    small, large = (work.count(lambda chat: calls[what](chat, text)) for text in texts)  # noqa: B023
    assert large <= 2.2 * small + 200
    small, large = (lines_run(lambda: calls[what](work.chat, text)) for text in texts)  # noqa: B023
    assert large <= 2.2 * small + 2_000


@pytest.mark.parametrize("budget", [200, 400, 800])
@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_cutting_takes_work_in_proportion_to_the_budget(parts, budget):
    work = Work(merging_tokenizer(("Ġ", "Ġ"), ("`", "`"), ("<", "|"), ("'", "'")))
    assert work.count(lambda chat: chat.cut(text_of(parts, 200_000), budget)) < 60 * budget + 5_000


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), byte_fallback_tokenizer()], ids=["bytes", "byte fallback"])
@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_locating_the_tokens_of_code_takes_nearly_linear_work(parts, tokenizer):
    work = Work(tokenizer)
    for length in (500, 1_000, 2_000):
        ids = tokenizer(text_of(parts, length) + "\n```python\nx", add_special_tokens=False)["input_ids"]
        code = extract_code(work.chat.text(ids))
        if code is not None:
            decoded = work.count(lambda chat: chat.token_spans(ids, code))  # noqa: B023
            assert decoded < 50 * len(ids) * math.log2(len(ids))


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), byte_fallback_tokenizer()], ids=["bytes", "byte fallback"])
@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_locating_the_tokens_of_a_statement_takes_nearly_linear_work(parts, tokenizer):
    work = Work(tokenizer)
    for length in (500, 1_000, 2_000):
        ids = tokenizer(text_of(parts, length) + "\n```python\nx\ny", add_special_tokens=False)["input_ids"]
        code = extract_code(work.chat.text(ids))
        if code is not None:
            line = code.source.count("\n") + 1
            step = Step(
                action_ids=ids, action_logprobs=None, bridge_ids=[], text="", code=code.source,
                code_spans=code.spans, observation="", failure=None,
            )  # fmt: skip
            decoded = work.count(lambda chat: statement_spans(chat, step, line))  # noqa: B023
            assert decoded < 50 * len(ids) * math.log2(len(ids))
