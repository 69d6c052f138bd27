"""The labels of blocks that hold code are the environment's to name."""

import pytest

from gvpo_trl.rollout.code import PYTHON, extract_code

SQL = ("sql", "sqlite")
TABLE = {
    "an sql fence": ("Look.\n```sql\nSELECT 1\n```\nDone.", "SELECT 1"),
    "capitals and an info string": ('```SQL title="a"\nSELECT 1\n```', "SELECT 1"),
    "another label of the environment": ("~~~sqlite\nSELECT 1\n~~~", "SELECT 1"),
    "a fence without a label": ("```\nSELECT 1\n```", "SELECT 1"),
    "imagined output in a bare fence": ("```sql\nSELECT 1\n```\n```\nx\n1\n```", "SELECT 1"),
    "python is another language": ("```python\nprint(1)\n```", None),
    "python before code": ("```python\nprint(1)\n```\n```sql\nSELECT 1\n```", "SELECT 1"),
    "two blocks in order": ("```sql\nSELECT 1;\n```\nthen\n```sql\nSELECT 2\n```", "SELECT 1;\nSELECT 2"),
    "an open block": ("```sql\nSELECT 1", "SELECT 1"),
    "another block begins before the first one ends": (
        "```sql\nSELECT 1;\n```sql\nSELECT 2\n```",
        "SELECT 1;\nSELECT 2",
    ),
    "three quotes, which are no string of SQL": ("```sql\nSELECT '''a'\n```\nIt's '''done'''\n```\n", "SELECT '''a'"),
}


@pytest.mark.parametrize("name", TABLE)
def test_sql_blocks(name):
    text, source = TABLE[name]
    found = extract_code(text, languages=SQL)
    assert (found and found.source) == source
    assert found is None or [text[start:end] for start, end in found.spans]


def test_python_is_the_default():
    text = "```sql\nSELECT 1\n```\n```py\nx = 1\n```"
    assert extract_code(text) == extract_code(text, languages=PYTHON)
    assert extract_code(text).source == "x = 1"
    assert extract_code(text, languages=SQL).source == "SELECT 1"
