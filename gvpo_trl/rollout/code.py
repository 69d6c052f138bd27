"""Finds the code in a turn: which blocks of the model's text are run, and where they stand in it.

The model writes this text, and the trainer reads it in its main thread. So the work must grow linearly with the length
of any text: the text is read line by line, and no regular expression here backtracks.
"""

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

PYTHON = ("python", "py", "python3")
"""Labels of Python blocks, which hold the code unless the environment names other labels."""
_MARKS = ("```", "~~~", "think>", "<end_code>")
_TAG = re.compile(r"<(/?)think>")
_LABEL = re.compile(r"[\w+#-]*")
_KEYWORDS = frozenset(keyword.kwlist + keyword.softkwlist)
_TOKEN = re.compile(
    r"""(?P<triple>'{3}|"{3})"""
    r"""|(?P<string>'(?:[^'\\\n]|\\[\s\S])*+'?|"(?:[^"\\\n]|\\[\s\S])*+"?)"""
    r"""|(?P<comment>\#[^\n]*+)|(?P<name>[^\W\d]\w*+)|\S"""
)
_STRING_END = {quotes: re.compile(rf"\\[\s\S]|{quotes}") for quotes in ("'''", '"""')}
_LOOKAHEADS = 4
"""Searches for a later closing fence that may fail in one turn. The bound keeps the work linear."""


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a turn and where it stands in the turn's text."""

    source: str
    spans: tuple[tuple[int, int], ...]
    """Half-open character ranges of the blocks."""
    closed: bool = False
    """Whether a block has its closing fence, and that fence does not stand in a string."""


@dataclass(frozen=True, slots=True)
class _Fence:
    """An opening fence."""

    mark: str
    """The backticks or tildes of the fence."""
    label: str
    """The first word behind the fence; `""` if there is none."""
    is_code: bool
    """Whether the label is one of those that mark code."""
    column: int
    indent: int
    """The length of the white space before the fence; 0 if text stands before the fence."""
    behind_text: bool

    @property
    def may_be_prose(self) -> bool:
        """Whether this fence counts as prose if a labelled block begins before a closing fence is found."""
        return not self.label or self.behind_text


@dataclass(frozen=True, slots=True)
class _Block:
    source: str
    span: tuple[int, int]
    is_labelled: bool
    is_closed: bool


def extract_code(text: str, *, first_block: bool = False, languages: Sequence[str] = PYTHON) -> Code | None:
    """Join the blocks of a turn that hold its code; `None` when there is nothing to run.

    A block begins with a fence of at least three backticks or tildes. One of the languages (in any case) behind the
    fence labels it as code; more words may follow. Text may stand before a labelled fence. A block without a label
    counts only in a turn without labelled blocks, because models write imagined output in such blocks. Blocks of other
    languages and everything inside `<think>` are skipped; a turn with `</think>` alone began inside a thought.

    A block ends at a fence that is at least as long as its own, alone on a line or at the end of a line of code, at
    `<end_code>`, or where another labelled block begins. A fence in a triple-quoted string does not end the block if
    the string and the block end later. A last block may be left open. The indent of a block's fence is removed from
    its lines.

    Args:
        text: the turn.
        first_block: whether only the first of the blocks is taken, as AppWorld's own agent does.
        languages: the labels of blocks that hold code, in lower case.
    """
    blocks = _find_blocks(text, languages)
    chosen = [block for block in blocks if block.is_labelled] or blocks
    if first_block:
        chosen = chosen[:1]
    if not chosen:
        return None
    return Code(
        source="\n".join(block.source for block in chosen),
        spans=tuple(block.span for block in chosen),
        closed=any(block.is_closed for block in blocks),
    )


def _find_blocks(text: str, languages: Sequence[str]) -> list[_Block]:
    """Return the blocks that are not blank, not of another language and not in a thought."""
    lines = _marked_lines(text)
    blocks: list[_Block] = []
    thinking = tagged = False
    lookaheads = _LOOKAHEADS
    place = 0
    while place < len(lines):
        start, line = lines[place]
        place += 1
        fence = _opening(line, languages)
        for tag in _TAG.finditer(line, 0, fence.column if fence else len(line)):
            if tag[1] and not tagged:
                blocks.clear()
            thinking, tagged = not tag[1], True
        if fence is None or thinking:
            continue
        begin = min(len(text), start + len(line) + 1)
        # Only Python has strings with three quotes, which may hold a fence.
        may_look_ahead = lookaheads > 0 and "python" in languages
        ending = _find_end(text, begin, lines, place, fence, languages, may_look_ahead=may_look_ahead)
        lookaheads -= ending.looked_in_vain
        place = ending.place
        body = text[begin : max(begin, ending.position)].removesuffix("\r")
        if body.strip() and not ending.is_prose and (fence.is_code or not fence.label):
            span = (begin, begin + len(body))
            blocks.append(_Block(_dedented(body, fence), span, fence.is_code, ending.closed))
    return blocks


def _marked_lines(text: str) -> list[tuple[int, str]]:
    """Return position and text of the lines that may open or end a block or a thought."""
    marked, start = [], 0
    for line in text.split("\n"):
        if any(mark in line for mark in _MARKS):
            marked.append((start, line))
        start += len(line) + 1
    return marked


def _trimmed(line: str) -> str:
    """Remove white space and `<end_code>` from the end of a line."""
    return line.rstrip().removesuffix("<end_code>").rstrip()


def _opening(line: str, languages: Sequence[str]) -> _Fence | None:
    """Return the fence with which the line opens a block; `None` if the line opens none."""
    line = _trimmed(line)
    end = max(line.rfind("```"), line.rfind("~~~")) + 3
    if end < 3:
        return None
    character = line[end - 1]
    before, info = line[:end].rstrip(character), line[end:]
    behind_text = bool(before.strip())
    label, indent = _label(info), 0 if behind_text else len(before)
    fence = _Fence(line[len(before) : end], label, label in languages, len(before), indent, behind_text)
    has_words = len(info.split(maxsplit=1)) > 1
    is_sentence = has_words and not fence.is_code and (behind_text or info[0].isspace())
    is_inline = (character == "`" and "`" in info) or (behind_text and character * 3 in before)
    is_stray = behind_text and (not fence.label or info.rstrip().endswith((".", ",", ";", "!", "?")))
    return None if is_sentence or is_inline or is_stray else fence


def _label(info: str) -> str:
    """Return the first word behind a fence in lower case, `"?"` for other signs and `""` for nothing."""
    words = info.split(maxsplit=1)
    return _LABEL.match(words[0].lstrip("{."))[0].lower() or "?" if words else ""


def _code_length(line: str, fence: _Fence) -> int | None:
    """Return the length of the code before the mark that may end the block on this line; `None` without a mark."""
    trimmed = _trimmed(line)
    code = trimmed.rstrip(fence.mark[0])
    if len(trimmed) - len(code) >= len(fence.mark) and (fence.mark[0] == "`" or not code.strip()):
        return len(code) if code.strip() else 0
    if line.rstrip().endswith("<end_code>"):
        return len(trimmed)
    return None


@dataclass(frozen=True, slots=True)
class _Ending:
    """Where a block ends."""

    place: int
    """The next marked line to read."""
    position: int
    """The end of the code in the text."""
    closed: bool = False
    is_prose: bool = False
    """Whether the opening fence turned out to be a stray fence or part of a sentence."""
    looked_in_vain: bool = False
    """Whether a string hides this end and no later one was found."""


def _find_end(
    text: str,
    begin: int,
    lines: Sequence[tuple[int, str]],
    place: int,
    fence: _Fence,
    languages: Sequence[str],
    *,
    may_look_ahead: bool,
) -> _Ending:
    """Find the end of the block whose code begins at `begin` and whose next marked line is `lines[place]`."""
    may_be_code = fence.is_code or not fence.label
    lexer = _Lexer(text, begin) if may_be_code and may_look_ahead else None
    in_string: _Ending | None = None  # The end of the block if the string that hides it never ends.
    for number in range(place, len(lines)):
        start, line = lines[number]
        length = _code_length(line, fence)
        if length is not None:
            ending = _Ending(number + 1, start + length if length else start - 1, closed=True)
        elif may_be_code and _begins_labelled_block(line, fence, languages):
            ending, length = _Ending(number, start - 1, is_prose=fence.may_be_prose), 0
        else:
            continue
        kind = lexer.kind_at(start + length) if lexer else "code"
        if kind == "triple" and not length:
            if ending.closed:
                in_string = in_string or replace(ending, closed=False, looked_in_vain=True)
        elif kind == "code" or not length:
            return in_string if in_string and lexer.last_prose > in_string.position else ending
    if in_string and (lexer.kind_at(len(text)) == "triple" or lexer.last_prose > in_string.position):
        return in_string
    return _Ending(len(lines), len(text))


def _begins_labelled_block(line: str, fence: _Fence, languages: Sequence[str]) -> bool:
    """Whether a line inside a block begins another one, because the block's own fence was stray or is not closed."""
    other = _opening(line, languages)
    if other is None or not other.is_code or other.behind_text:
        return False
    return not fence.label or len(other.mark) >= len(fence.mark)


class _Lexer:
    """Finds the strings and comments of Python code. It reads the text once, from `start` on."""

    def __init__(self, text: str, start: int):
        self._text = text
        self._start = self._end = start
        self._kind = "code"
        self._word = ""  # The last name or string; `""` after any other token.
        self.last_prose = -1
        """The last position where two words stand side by side as in no Python code; -1 if there is none."""

    def kind_at(self, position: int) -> str:
        """Return `"triple"`, `"string"`, `"comment"` or `"code"`; positions must not descend."""
        while self._end <= position and self._end < len(self._text):
            self._read_token()
        return self._kind if self._start < position < self._end else "code"

    def _read_token(self) -> None:
        token = _TOKEN.search(self._text, self._end)
        if token is None:
            self._start = self._end = len(self._text)
            return
        kind, word = token.lastgroup or "code", token[0] if token.lastgroup in ("name", "string", "triple") else ""
        is_beside = bool(word and self._word) and token.start() > self._end
        if is_beside and not self._text[self._end : token.start()].strip(" \t") and not self._may_join(kind, word):
            self.last_prose = token.start()
        self._start, self._end, self._word = token.start(), token.end(), word
        self._kind = "code" if kind == "name" else kind
        if kind == "triple":
            closing = next((end for end in _STRING_END[word].finditer(self._text, self._end) if end[0] == word), None)
            self._end = closing.end() if closing else len(self._text) + 1

    def _may_join(self, kind: str, word: str) -> bool:
        """Whether Python code may have the last word and this one side by side."""
        return word in _KEYWORDS or self._word in _KEYWORDS or (kind != "name" and self._word[0] in "'\"")


def _dedented(body: str, fence: _Fence) -> str:
    """Remove an indent from every line: the fence's, or the first line's if text stands before the fence."""
    lines = body.replace("\r\n", "\n").split("\n")
    first = next(line for line in lines if line.strip())
    indent = len(first) - len(first.lstrip(" \t")) if fence.behind_text else fence.indent
    return "\n".join(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines)
