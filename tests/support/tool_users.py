"""A small model that calls tools. It has learnt within seconds to choose among turns that are one token each."""

import json
from functools import cache
from pathlib import Path

import torch
import trl
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.support.tiny import tiny_model, tiny_tokenizer

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def call(name: str, **arguments) -> str:
    """Return the text of a tool call in Qwen3's form."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


BROKEN = '<tool_call>\n{"name": "query", "arguments": {"sql": }\n</tool_call>'
"""A call that does not parse."""
SQL_TURNS = (
    call("list_tables"),
    call("query", sql="SELECT COUNT(*) FROM books WHERE author = 'Austen'"),
    call("query", sql="SELECT nothing FROM books"),
    call("describe", table="lenders"),
    call("describe", tables="books"),
    call("drop", table="books"),
    call("list_tables") + "\n" + call("query", sql="SELEC 1"),
    BROKEN,
    "2",
    "1854",
    "Ada",
)
WORDLE_TURNS = (
    *(call("guess", word=word) for word in ("crane", "slate", "cranes", "12345")),
    call("gues", word="a"),
    "Done",
)


@cache
def tool_user(turns: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], PreTrainedTokenizerFast]:
    """Return the weights and the tokenizer of a model that says one of these turns, each about as often."""
    tokenizer = tiny_tokenizer(QWEN3, extra=turns)
    model = tiny_model(tokenizer)
    start = tokenizer("<|im_start|>assistant\n")["input_ids"]
    no_thought = tokenizer("<think>\n\n</think>\n\n")["input_ids"]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    choices = [[tokenizer.convert_tokens_to_ids(turn), tokenizer.eos_token_id] for turn in turns]
    for _ in range(60):
        rows = []
        for choice in choices:
            noise = torch.randint(3, 259, (300,), generator=generator).tolist()
            rows.append([*noise, *start, *no_thought, *choice])
        ids = torch.tensor(rows)
        labels = ids.clone()
        labels[:, :-2] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), tokenizer


def fresh_model(turns: tuple[str, ...]) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model of its own with these weights, and the tokenizer."""
    weights, tokenizer = tool_user(turns)
    model = tiny_model(tokenizer)
    model.load_state_dict(weights)
    return model, tokenizer
