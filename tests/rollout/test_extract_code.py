"""`extract_code` finds the code in a turn, and `Chat.token_spans` the tokens that hold it."""

import argparse
import difflib
import inspect
import io
import textwrap
import tokenize
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.code import extract_code
from tests.support.templates import byte_fallback_tokenizer, merging_tokenizer, with_special
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
    "tildes": ("~~~python\nx = 1\n~~~", "x = 1"),
    "tildes around backticks": ("~~~python\nx = 1\n```\n~~~", "x = 1\n```"),
    "backticks around tildes": ("```python\nx = 1\n~~~\n```", "x = 1\n~~~"),
    "a python3 fence": ("```python3\nx = 1\n```", "x = 1"),
    "white space before the label": ("``` python\nx = 1\n```", "x = 1"),
    "an info string": ('```python title="a.py"\nx = 1\n```', "x = 1"),
    "an info string without a space": ("```python{1,3}\nx = 1\n```", "x = 1"),
    "a file name behind the label": ("```python:a.py\nx = 1\n```", "x = 1"),
    "a label in braces": ("```{.python}\nx = 1\n```", "x = 1"),
    "an info string of another language": ('```json title="a"\n{}\n```\nx = 1', None),
    "four backticks": ("````python\nx = 1\n````", "x = 1"),
    "four backticks around three": ("````python\nx = 1\n```\ny = 2\n````", "x = 1\n```\ny = 2"),
    "a closing fence that is longer": ("```python\nx = 1\n`````\nDone", "x = 1"),
    "a fence behind text": ("Code: ```python\nx = 1\n```", "x = 1"),
    "a fence of another language behind text": ("Output: ```json\n{}\n```\nprose", None),
    "a fence behind text with an info string": ("Code: ```python title=a.py\nx = 1\n```", "x = 1"),
    "four backticks behind text": ("Code: ````PYTHON3\nx = 1\n````", "x = 1"),
    "a fence in a list": ("- ```python\n  if x:\n      y()\n  ```", "if x:\n    y()"),
    "a sentence about fences": ("I write ```python fences.\n```python\nx = 1\n```", "x = 1"),
    "a sentence that ends with a label": ("I use ```python.\nThat is all.", None),
    "a sentence about a fence": ("Put ```these around code:\n```python\nx = 1\n```", "x = 1"),
    "a block that is not closed before the next": ("```python\nx = 1\n```python\ny = 2\n```", "x = 1\ny = 2"),
    "a label in a block of another language": ("```md\n```python\nbad()\n```\nx", None),
    "a labelled block in a bare one": ("`````\n```python\nx = 1\n```\n`````", "x = 1"),
    "a sentence that begins with a fence": ("``` is a fence.\n```python\nx = 1\n```", "x = 1"),
    "a stray closing fence": ("```python\nx = 1\n```\n```\nDone", "x = 1"),
    "a stray fence before the code": ("```\n```python\nx = 1\n```", "x = 1"),
    "a stray fence at the end of a line": ("Done.```\n```python\nx = 1\n```", "x = 1"),
    "a fence at the end of the code": ("```python\nx = 1```\nThis is it.", "x = 1"),
    "a fence at the end of a comment": ("```python\nx = 1  # no ```\ny = 2\n```", "x = 1  # no ```\ny = 2"),
    "the end of code": ("```python\nx = 1\n```<end_code>", "x = 1"),
    "the end of code on its own line": ("```python\nx = 1\n```\n<end_code>", "x = 1"),
    "the end of code without a fence": ("```python\nx = 1\n<end_code>\nDone", "x = 1"),
    "the end of code behind code": ("```python\nx = 1<end_code>", "x = 1"),
    "imagined output in a bare fence": ("```python\nx = 1\n```\nOutput:\n```\nx is 1\n```", "x = 1"),
    "imagined output before the code": ("```\n5\n```\n```python\nx = 1\n```", "x = 1"),
    "imagined output between two blocks": ("```py\nx = 1\n```\n```\n5\n```\n```py\ny = 2\n```", "x = 1\ny = 2"),
    "bare fences alone": ("```\nx = 1\n```\n```\ny = 2\n```", "x = 1\ny = 2"),
    "a bare fence behind another language": ("```json\n{}\n```\n```\nx = 1\n```", "x = 1"),
    "a fence in a string": ('```python\nx = """\n```\n"""\ny = 2\n```\n5', 'x = """\n```\n"""\ny = 2'),
    "two fences in a string": ("```py\nx = '''\n```py\n```\n'''\n```", "x = '''\n```py\n```\n'''"),
    "a fence in a string of an open block": ("```py\nx = '''\n```\n'''\ny = 2", "x = '''\n```\n'''\ny = 2"),
    "a string that is never closed": ("```py\nx = '''a\n```\nDone.", "x = '''a"),
    "a string that only prose closes": ("```py\nx = '''a\n```\nIt's ''' and then prose\n```", "x = '''a"),
    "a string that is closed before the fence": ("```py\nx = '''a'''\n```\n'''\n```", "x = '''a'''"),
    "quotes in a comment": ("```py\nx = 1  # '''\n```\n'''\n```", "x = 1  # '''"),
    "quotes in a string": ("```py\nx = \"'''\"\n```\n'''\n```", "x = \"'''\""),
    "an escaped quote in a string": ("```py\nx = '''\\''''\n```\n'''\n```", "x = '''\\''''"),
    "a thought on the line of the fence": ("<think>hm</think>```python\nx = 1\n```", "x = 1"),
    "a fence in a thought on one line": ("<think>Code: ```python\nbad()\n```\n</think>", None),
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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```\n```python\ny = 2\n```", "x = 1"),
        ("```\n5\n```\n```python\nx = 1\n```\n```python\ny = 2\n```", "x = 1"),
        ("```\nx = 1\n```\n```\ny = 2\n```", "x = 1"),
        ("```python\n```\n```python\ny = 2\n```", "y = 2"),
        ("no code", None),
    ],
)
def test_the_first_block_alone(text, code):
    found = extract_code(text, first_block=True)
    assert (found.source if found else None) == code


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("```python\nx = 1", False),
        ("```python\nx = 1\n```", True),
        ("```python\nprint('```", False),
        ("```python\nx = '''\n```", False),
        ("```python\nx = '''\n```\n'''\n```", True),
        ("```\nx = 1\n```\n```python\ny = 2", True),
        ("~~~python\nx = 1\n~~~", True),
    ],
)
def test_whether_a_block_is_closed(text, closed):
    assert extract_code(text).closed is closed


@pytest.mark.parametrize("module", [argparse, difflib, textwrap, typing], ids=lambda module: module.__name__)
def test_a_module_with_fences_in_its_docstrings_is_one_block(module):
    source = inspect.getsource(module).rstrip("\n")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    docstrings = [token.start[0] for token in tokens if token.type == tokenize.STRING and "\n" in token.string]
    lines = source.split("\n")
    for line in reversed(docstrings):
        lines.insert(line, "```")
    code = extract_code("\n".join(["Here it is:", "```python", *lines, "```", "Don't run this:", "```", "5", "```"]))
    assert (code.source, code.closed) == ("\n".join(lines), True)
    assert len(docstrings) > 10


PLAIN = ["x = 1", "", "  y", "'''", '"""', "s = 'a", "# it's", "\\", "prose and more", "z\r"]
MARKED = ["```", "```python", "````", "~~~", "Code: ```py", "```json", "x```", "<think>", "</think>", "```<end_code>"]


@settings(max_examples=400, deadline=None)
@given(lines=st.lists(st.sampled_from(PLAIN + MARKED), max_size=14))
def test_spans_are_in_order_and_hold_the_source(lines):
    text = "\n".join(lines)
    code = extract_code(text)
    if code is None:
        return
    places = [place for span in code.spans for place in span]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= len(text)
    inside = "\n".join(text[start:end] for start, end in code.spans).replace("\r\n", "\n")
    assert [line.lstrip() for line in inside.split("\n")] == [line.lstrip() for line in code.source.split("\n")]
    assert code.source.strip()


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.sampled_from(PLAIN), max_size=6),
    code=st.sampled_from(["x = 1", "print('a')", 's = """\n```\n"""']),
    after=st.lists(st.sampled_from(["", "5", "```", "Done.", "prose and more", "<end_code>"]), max_size=6),
)
def test_a_labelled_block_is_the_code_whatever_plain_text_and_bare_fences_surround_it(before, code, after):
    found = extract_code("\n".join([*before, "```python", code, "```", *after]))
    assert (found.source, found.closed) == (code, True)


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


@pytest.mark.parametrize("opened", ["<think>", ""], ids=["by the model", "by the prompt"])
def test_code_in_a_thought_is_not_run_where_its_tags_are_control_tokens(opened):
    tokenizer = with_special(tiny_tokenizer(), "<think>", "</think>")
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    text = f"{opened}\n```python\nbad()\n```\n</think>\n```python\nx = 1\n```"
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert chat.text(ids) == text
    code = extract_code(chat.text(ids))
    ((start, end),) = chat.token_spans(ids, code)
    assert (code.source, tokenizer.decode(ids[start:end])) == ("x = 1", "x = 1")
