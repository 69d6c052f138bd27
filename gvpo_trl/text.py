r"""Shows the characters that would control a terminal: agents, models and environments can write any text.

A terminal obeys escape sequences (they clear the screen, write to the clipboard), C1 controls and carriage returns,
and it reorders text around bidirectional controls. These functions replace every character that Python calls not
printable with its escape, such as `\x1b` or `\u202e`. They take time and memory in proportion to the text, and a
second call changes nothing more. The exact text stays in the traces. This module imports the standard library only.
"""

from typing import Any


class _Shown:
    """A table for `str.translate` that maps each code point to the text that stands for it."""

    def __init__(self, kept: str):
        self._kept = kept

    def __getitem__(self, code: int) -> str:
        character = chr(code)
        if character.isprintable() or character in self._kept:
            return character
        return character.encode("unicode_escape").decode("ascii")


_TEXT, _LINE = _Shown("\n\t"), _Shown("")


def printable(text: str) -> str:
    """Escape all characters of a text that are not printable, except newlines and tabs."""
    return text if text.isprintable() else text.translate(_TEXT)


def printable_line(text: str) -> str:
    """Escape all characters of a text that are not printable, so that it fills one line of a log or a table."""
    return text if text.isprintable() else text.translate(_LINE)


def brief(text: str, length: int = 200) -> str:
    """Return the first and the last line of a text as one line; the last line of quoted output names its cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = lines if len(lines) <= 1 else [lines[0], lines[-1]]
    return printable_line(" … ".join(line if len(line) <= length else line[: length - 1] + "…" for line in kept))


def printable_values(value: Any) -> Any:
    """Apply `printable` to every string in nested lists and dictionaries, such as the messages of a conversation."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(inner) for inner in value]
    return value


def spelled_out(text: str) -> str:
    r"""Replace lone surrogates, which no tokenizer and no file accepts, by their escapes such as `\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
