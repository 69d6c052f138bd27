"""Makes the small SQL agent's tokenizer: single bytes, and one token for each word, number and piece of SQL."""

import re

from transformers import PreTrainedTokenizerFast

from gvpo_trl.environments.sql.tasks import SYSTEM
from gvpo_trl.environments.sql.words import POOLS
from recipes.quickstart.tokenizer import make_tokenizer

CHUNKS = (
    "user\n", "assistant\n", "system\n", "```sql\n", "\n```", "Output:\n```\n",
    "SELECT name FROM sqlite_master", "SELECT sql FROM sqlite_master WHERE name = '", "SELECT answer(", "SELECT ",
    "SUM(", "COUNT(", "MAX(", ") FROM ", ")) FROM ", " FROM ", " FORM ", " WHERE ", " AND ", " = '", " = ", "'", ", ",
    "name\n", "sql\n", "answer(", "\ntaken\n", "Your answer was taken.", "CREATE TABLE ", " INTEGER", " TEXT", " (",
    "Error: ", "no such column: ", "no such table: ", 'near "', '": syntax error', "[no rows]", "NULL", " | ",
    "unrecognized token: ", "[more rows than 8 are not shown]", "is asked for",
    "Find the ", "total ", " of the ", " of each ", " in the group ", "name of the ", ", and the ",
    " that comes next after the ", "_table", "\n[… ", " of ", " tokens left out …]\n",
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer, always with the same ids."""
    words = POOLS["warm"]
    pieces = _pieces()
    columns = [*words.id_columns, *words.name_columns, *words.group_columns]
    columns += [name for pair in words.property_columns for name in pair]
    tokens = [part for part in re.findall(r"[^.]+\.? ?", SYSTEM) if len(part) > 1]
    tokens += CHUNKS
    tokens += [*words.nouns, *words.measures, *words.names, *words.groups, *columns, *pieces, *words.parts]
    tokens += [str(number) for number in range(10, 100)]
    # "no" is a token only where it stands alone, and so is "36", which "364" does not hold.
    return make_tokenizer(dict.fromkeys(tokens), alone=r"id|key|no|num|ref|tag|[A-Z]\w+|\d\d")


def value_tokens() -> list[str]:
    """List the words that a query has to copy from the question or an observation."""
    words = POOLS["warm"]
    columns = [*words.id_columns, *words.name_columns, *words.group_columns]
    columns += [name for pair in words.property_columns for name in pair]
    return [
        *(*words.nouns, *words.measures, *words.names, *words.groups, *columns, *_pieces(), "s"),
        *map(str, range(10, 100)),
    ]


def _pieces() -> list[str]:
    """List what stands before or behind a word in names of tables and columns."""
    words = POOLS["warm"]
    pieces = [piece for affix in words.affixes for piece in affix.split("*") if len(piece) > 1]
    pieces += [form.removesuffix("_*") for form in words.next_columns]
    return pieces + [f"_{name}" for name in (*words.id_columns, *words.name_columns)]
