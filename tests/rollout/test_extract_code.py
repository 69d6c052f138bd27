"""Which characters of a turn are its code, and which tokens."""

import pytest

from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.code import extract_code
from tests.support.templates import byte_fallback_tokenizer, merging_tokenizer
from tests.support.tiny import tiny_tokenizer

TABLE = {
    "a python fence": ("Look.\n```python\nx = 1\n```\nDone.", "x = 1"),
    "a py fence": ("```py\nx = 1\n```", "x = 1"),
    "a fence in capitals": ("```Python\nx = 1\n```", "x = 1"),
    "a fence without a language": ("```\nx = 1\n```", "x = 1"),
    "white space after the language": ("```python  \nx = 1\n```  ", "x = 1"),
    "two lines": ("```python\nx = 1\ny = 2\n```", "x = 1\ny = 2"),
    "an unclosed fence": ("I write\n```python\nx = 1\nprint(x)", "x = 1\nprint(x)"),
    "an unclosed fence with a last newline": ("```python\nx = 1\n", "x = 1\n"),
    "nothing behind an unclosed fence": ("```python\n", None),
    "a fence at the very end": ("text\n```python", None),
    "two blocks in order": ("```python\nx = 1\n```\nthen\n```py\ny = 2\n```", "x = 1\ny = 2"),
    "a closed and an unclosed block": ("```python\nx = 1\n```\n```python\ny = 2", "x = 1\ny = 2"),
    "a json block": ('```json\n{"x": 1}\n```', None),
    "a json block before code": ('```json\n{"x": 1}\n```\n```python\nx = 1\n```', "x = 1"),
    "an unclosed bash block": ("```bash\nls", None),
    "a block in a thought": ("<think>\n```python\nbad()\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
    "code in a thought alone": ("<think>\n```python\nbad()\n```\n</think>\nDone.", None),
    "an open thought": ("<think>\n```python\nbad()\n```", None),
    "a thought that the prompt opened": ("Try\n```python\nbad()\n```\n</think>\n```python\nx = 1\n```", "x = 1"),
    "a thought after code": ("```python\nx = 1\n```\n<think>\n```python\nbad()\n```\n</think>", "x = 1"),
    "a tag in a string": ('```python\nprint("<think>")\n```\nDone.', 'print("<think>")'),
    "a closing tag in a string": ('```python\nx = 1\nprint("</think>")\n```', 'x = 1\nprint("</think>")'),
    "an indented fence": ("1. Run\n   ```python\n   for x in y:\n       f(x)\n   ```", "for x in y:\n    f(x)"),
    "an indented fence over flush code": ("  ```python\nx = 1\n    ```", "x = 1"),
    "carriage returns": ("Run\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\nDone", "x = 1\ny = 2"),
    "tildes": ("~~~python\nx = 1\n~~~", None),
    "text after the block": ("```python\nx = 1\n```\nThis prints 1.\nSure.", "x = 1"),
    "a blank block": ("```python\n\n  \n```", None),
    "an empty block": ("```python\n```", None),
    "a blank block before code": ("```python\n```\n```python\nx = 1\n```", "x = 1"),
    "backticks in a string": ('```python\nprint("```")\n```', 'print("```")'),
    "backticks in the middle of a line": ("```python\nx = 1 # ``` not\n```", "x = 1 # ``` not"),
    "an opening fence inside a block": ("```python\nx = '''\n```python\n'''\n```", "x = '''\n```python\n'''"),
    "inline code": ("Use ```x = 1``` or `y`.", None),
    "another language that begins like it": ("```pycon\n>>> 1\n```", None),
    "no fence": ("x = 1", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "code"), TABLE.values(), ids=TABLE.keys())
def test_code_of_a_turn(text, code):
    found = extract_code(text)
    assert (found.source if found else None) == code


@pytest.mark.parametrize("text", [text for text, code in TABLE.values() if code], ids=lambda text: None)
def test_spans_are_where_the_code_stands(text):
    code = extract_code(text)
    pieces = [text[start:end].replace("\r\n", "\n") for start, end in code.spans]
    flat = "\n".join(pieces)
    assert flat == code.source or [line.strip() for line in flat.split("\n")] == [
        line.strip() for line in code.source.split("\n")
    ]


MERGES = (("`", "`"), ("``", "`"), (")", "Ċ"), ("Ċ", "p"))


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), byte_fallback_tokenizer()], ids=["bytes", "byte fallback"])
@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("a\n```\nx=1\n```\n<|im_end|>", ["x=1"]),
        ("```\nx=1\n```\nb\n```\ny\n```<|im_end|>", ["x=1", "y"]),
        ("```\nx=1<|im_end|>", ["x=1"]),
        ("```\nx=1", ["x=1"]),
        ("ü€😀\n```\nx='é'\n```<|im_end|>", ["x='é'"]),
        ("```\né=€\n```\n", ["é=€"]),
        ("```\n😀x😀", ["😀x😀"]),
        ("```\n😀x😀<|im_end|>", ["😀x😀"]),
    ],
)
def test_token_spans_cover_exactly_the_code_in_bytes(text, spans, tokenizer):
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = chat.token_spans(ids, extract_code(chat.text(ids)))
    assert [tokenizer.decode(ids[start:end]) for start, end in found] == spans


def test_token_spans_take_in_a_token_that_holds_code_and_a_fence():
    tokenizer = merging_tokenizer(*MERGES)
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    ids = tokenizer("```\npr(x)\n```<|im_end|>", add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["```", "Ċp", "r", "(", "x", ")Ċ", "```", "<|im_end|>"]
    assert chat.token_spans(ids, extract_code(chat.text(ids))) == ((1, 6),)


def test_token_spans_of_a_turn_with_a_control_token_in_its_middle():
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    ids = tokenizer("a<|im_start|>\n```\nxy\n```", add_special_tokens=False)["input_ids"]
    ((start, end),) = chat.token_spans(ids, extract_code(chat.text(ids)))
    assert tokenizer.decode(ids[start:end]) == "xy"
