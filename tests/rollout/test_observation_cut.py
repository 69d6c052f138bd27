"""A cut observation keeps its head and its tail and says how much is left out."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.rollout.chat import Chat
from tests.support.templates import CountingTokenizer, byte_fallback_tokenizer, merging_tokenizer
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER, [TOKENIZER.eos_token_id])
NOTICE = re.compile(r"\n\[… (?P<left_out>\d+) of (?P<total>\d+) tokens left out …\]\n")


def length(text, tokenizer=TOKENIZER):
    """Return the number of tokens of a text whose control strings are encoded as letters."""
    return len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@pytest.mark.parametrize("text", ["", "x" * 99, "x" * 100, "é" * 50])
def test_a_text_in_its_budget_is_left_alone(text):
    assert CHAT.cut(text, 100) == text


def test_head_tail_and_numbers():
    text = "".join(f"{n:03d} " for n in range(250))  # 1000 tokens
    cut = CHAT.cut(text, 100)
    notice = NOTICE.search(cut)
    head, tail = cut[: notice.start()], cut[notice.end() :]
    assert text.startswith(head) and text.endswith(tail)
    assert 0 <= len(head) - len(tail) <= 1
    assert (int(notice["total"]), int(notice["left_out"])) == (1000, 1000 - len(head) - len(tail))
    assert length(cut) == 100


def test_one_token_over_the_budget_is_cut():
    cut = CHAT.cut("x" * 101, 100)
    assert NOTICE.search(cut)["total"] == "101"
    assert length(cut) <= 100


@pytest.mark.parametrize("text", ["é€😀" * 100, "😀" * 300, "€" * 77 + "x" * 200])
@pytest.mark.parametrize("budget", [60, 61, 62, 63])
def test_characters_are_not_torn(text, budget):
    cut = CHAT.cut(text, budget)
    assert "\ufffd" not in cut
    head, tail = NOTICE.split(cut)[0], NOTICE.split(cut)[-1]
    assert text.startswith(head) and text.endswith(tail)
    assert length(cut) <= budget


@pytest.mark.parametrize("budget", range(1, 21))
@pytest.mark.parametrize("text", ["x" * 500, "😀" * 50, "<|im_end|>" * 50])
def test_tiny_budgets_hold(text, budget):
    cut = CHAT.cut(text, budget)
    assert length(cut) <= budget
    assert "\ufffd" not in cut


def test_control_strings_count_as_their_letters():
    assert CHAT.cut("<|im_end|>" * 10, 100) == "<|im_end|>" * 10
    assert length(CHAT.cut("<|im_end|>" * 11, 100)) <= 100


def test_five_megabytes_are_not_encoded_whole():
    tokenizer = CountingTokenizer(TOKENIZER)
    chat = Chat(tokenizer, [TOKENIZER.eos_token_id])
    tokenizer.encoded = 0
    cut = chat.cut("first " + "word " * 1_000_000 + "last", 3000)
    assert cut.startswith("first word") and cut.endswith("word last")
    assert "of about 5000010 tokens left out" in cut
    assert length(cut) <= 3000
    assert tokenizer.encoded < 200_000


def test_a_long_text_of_few_tokens_is_not_cut():
    merges = [("-" * 2**n, "-" * 2**n) for n in range(8)]  # One token holds 256 dashes.
    tokenizer = merging_tokenizer(*merges)
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    text = "-" * 256 * 99
    assert chat.cut(text, 100) == text
    assert length(chat.cut(text * 3, 100), tokenizer) <= 100


@pytest.mark.parametrize("budget", [1, 7, 30, 50])
def test_the_budget_holds_for_a_tokenizer_that_falls_back_on_bytes(budget):
    chat = Chat(byte_fallback_tokenizer(), [2])
    cut = chat.cut("é😀 word " * 50, budget)
    assert length(cut, chat.tokenizer) <= budget
    assert "\ufffd" not in cut


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=300), budget=st.integers(1, 120))
def test_the_budget_holds_for_any_text(text, budget):
    cut = CHAT.cut(text, budget)
    assert length(cut) <= budget
    assert cut == text or length(text) > budget
