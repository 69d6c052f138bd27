"""Makes the small agent's tokenizer of about 850 tokens.

Single bytes are among its tokens, so any text is encoded and decoded without a loss. Each text that the agent has to
copy (a name, a title, an amount, an address, the name of an API or an argument) is one token, because a model of a
million parameters learns to copy a token and does not learn to spell. Passwords are no tokens: the agent passes them
on in a variable and never writes one.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gvpo_trl.environments.appworld.tasks import USER_TEMPLATE, load_prompt
from gvpo_trl.pocket.families import FAMILIES, NORMAL_SPLITS, POOLS, Draw, Family, closed_sets

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Long texts that are always the same in prompts, code and tracebacks. As one token each they keep sequences short.
CHUNKS = (
    "user\n", "assistant\n", "system\n", "```python\n", "\n```", "Output:\n```\n",
    "Execution successful.", "Execution failed. Traceback:\n", '  File "<python-input>", line ', ", in <module>\n    ",
    "Syntax error in line:\n", "\nMessage: ", "invalid syntax", "'(' was never closed",
    ". Perhaps you forgot a comma?",
    "Exception: ", "KeyError: '", "NameError: name '", "TypeError: ", "' is not defined", "No API named '",
    "' found in the ", " app.", "Response status code is ", ':\n{"message":"', '"}', "Validation error. Reason: \\n",
    ": field required", ": value is not a valid integer", ": value is not a valid email address",
    "Invalid credentials",
    "You are either not authorized to access this ",
    " API endpoint or your access token is missing, invalid or expired.", "No APIs with name ", " found for the ",
    ". Check the api and app name again.", "422", "401", "409", "404", "\n[… ", " of ", " tokens left out …]\n",
    "apis.", "access_token=", "access_token=token", 'pw = {a["account_name"]: a["password"] for a in ',
    "token = ", '["access_token"]', "~~^^", "~^^",
)  # fmt: skip
RUNS = tuple(character * length for character in "^ " for length in (2, 4, 8, 16, 32))


def build_tokenizer(api_docs: Path) -> PreTrainedTokenizerFast:
    """Make the tokenizer from the families and the docs of the APIs that they look up.

    Args:
        api_docs: the folder `data/api_docs/standard` of a data root.
    """
    # A short word is a token only where it stands alone, so "Banana" does not hold the token "Ana".
    return make_tokenizer(_tokens(api_docs), alone=r"\w{1,4}|[A-Z]\w+|\d.*")


def make_tokenizer(tokens: Iterable[str], alone: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes and the given tokens, with the ChatML template.

    Args:
        tokens: texts that are one token each.
        alone: a pattern of the texts that are a token only where no letter or digit stands beside them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, single_word=bool(re.fullmatch(alone, token))) for token in tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _tokens(api_docs: Path) -> list[str]:
    """List all tokens except bytes and special ones, always in the same order."""
    families = [family for family in FAMILIES.values() if family.splits == NORMAL_SPLITS]
    code = [text for family in families for text in _code_of(family)]
    words = Counter(word for text in code for word in re.findall(r"[A-Za-z_]\w*", text))
    glue = Counter(run for text in code for run in re.findall(r"[^\w\n]+", text) if len(run) > 1)
    tokens = [value for values in closed_sets().values() for value in values]
    tokens += CHUNKS + RUNS
    tokens += sorted({f"apis.{app}." for app in re.findall(r"\bapis\.(\w+)\.", "\n".join(code))})
    tokens += _arguments(families, api_docs)
    tokens += sorted(words)
    tokens += sorted(run for run, count in glue.items() if count > 4)
    tokens += _prose(families)
    return list(dict.fromkeys(tokens))


def _code_of(family: Family, draws: int = 6) -> Iterable[str]:
    """Yield the code of a family for a few draws, with each value replaced by a zero."""
    names = sorted({value for values in closed_sets().values() for value in values}, key=len, reverse=True)
    blank = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    for seed in range(draws):
        values = family.sample(Draw(random.Random(seed), POOLS))
        slips = [slip for options in family.slips(values) for slip in options]
        for text in [*family.turns(values), *(slip.code for slip in [*slips, *family.wrong_ends(values)])]:
            yield blank.sub("0", text)


def _arguments(families: list[Family], api_docs: Path) -> list[str]:
    """List the arguments of the documented APIs, which looking up the docs prints."""
    names = []
    for app, api in [family.documented for family in families if family.documented]:
        doc = json.loads((api_docs / f"{app}.json").read_text(encoding="utf-8"))[api]
        names += [parameter["name"] for parameter in doc["parameters"]]
    return sorted(set(names))


def _prose(families: list[Family]) -> list[str]:
    """List the sentences of the system prompt and the words of the instructions."""
    system = re.findall(r"[^.;]+(?:\.(?=\S)[^.;]*)*(?:[.;] ?|$)", load_prompt("compact").template)
    user = re.split(r"\$\w+", USER_TEMPLATE)
    phrases = " ".join(re.sub(r"\{\w+\}", "0", phrase) for family in families for phrase in family.phrases)
    return [part for part in [*system, *user] if part] + sorted(set(re.findall(r"\b[A-Za-z]+\b ?", phrases)))
