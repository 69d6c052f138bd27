"""The code in a turn: which blocks of a model's text are run, and where they stand in it."""

import re
from dataclasses import dataclass

_MARK = re.compile(r"^(?P<indent>[ \t]*)```[ \t]*(?P<language>[\w+-]*)[ \t]*\r?$|<(?P<closes>/?)think>", re.MULTILINE)
_LANGUAGES = ("", "python", "py")


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a turn and where it stands in the turn's text."""

    source: str
    spans: tuple[tuple[int, int], ...]
    """Half-open character ranges of the blocks."""


def extract_code(text: str) -> Code | None:
    """Join the fenced blocks of a turn in order; `None` when there is nothing to run.

    A block is opened by a line of three backticks with `python`, `py` or nothing behind them; a last block may be left
    unclosed. Blocks of other languages are skipped, and so is what stands inside `<think>`, also where the generation
    prompt opened it and the turn holds `</think>` alone. An indented fence takes its indent off its lines.
    """
    blocks: list[tuple[str, tuple[int, int]]] = []
    opened: re.Match | None = None
    thinking = tagged = False
    for mark in _MARK.finditer(text):
        if mark["language"] is None:
            if opened is None:
                if mark["closes"] and not tagged:
                    blocks.clear()
                thinking, tagged = not mark["closes"], True
        elif thinking:
            continue
        elif opened is None:
            opened = mark
        elif not mark["language"]:
            _add_block(text, opened, mark.start() - 1, blocks)
            opened = None
    if opened is not None:
        _add_block(text, opened, len(text), blocks)
    if not blocks:
        return None
    return Code("\n".join(source for source, _ in blocks), tuple(span for _, span in blocks))


def _add_block(text: str, opened: re.Match, end: int, blocks: list[tuple[str, tuple[int, int]]]) -> None:
    """Add the block between an opening fence and the end of its last line, unless blank or of another language."""
    start = opened.end() + 1
    body = text[start : max(start, end)].removesuffix("\r")
    if opened["language"].lower() not in _LANGUAGES or not body.strip():
        return
    source = body.replace("\r\n", "\n")
    if opened["indent"]:
        source = re.sub(rf"^[ \t]{{1,{len(opened['indent'])}}}", "", source, flags=re.MULTILINE)
    blocks.append((source, (start, start + len(body))))
