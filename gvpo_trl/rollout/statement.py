"""Finds the sampled tokens from the statement that raised to the end of a turn's code."""

from collections.abc import Sequence

from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.code import Code, extract_code
from gvpo_trl.rollout.types import Step


def statement_spans(chat: Chat, step: Step, failed_line: int | None) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of the step's sampled tokens that hold the code from a line on.

    The first range begins with the token that holds the line's first letter. A token that also holds the end of the
    line before belongs to the range, because tokens cannot be divided.

    Args:
        chat: decodes the sampled ids, as it did when the code was found.
        step: the step, whose code ran.
        failed_line: the line of `step.code`, from 1, that the environment reported. It may come from a process that
            the agent controls, so a value that is no line of the code is ignored.
    """
    if failed_line is None or not step.code_spans:
        return ()
    text = chat.text(step.action_ids)
    code = extract_code(text)
    start = None if code is None else line_start(text, code, failed_line)
    if start is None:
        return ()
    rest = tuple((max(begin, start), end) for begin, end in code.spans if end > start)
    return chat.token_spans(step.action_ids, Code(source="", spans=rest))


def line_start(text: str, code: Code, line: int) -> int | None:
    """Return the position in the turn's text of the first letter of a line of the code; `None` without such a line.

    Args:
        text: the turn.
        code: the code that `extract_code` found in the text.
        line: number of a line of `code.source`, from 1. The blocks are joined by line breaks, so the lines of the
            blocks count on; only the indent of a line differs between the text and the source.
    """
    starts = [start for span in code.spans for start in _line_starts(text, span)]
    if not 1 <= line <= len(starts):
        return None
    start = starts[line - 1]
    while start < len(text) and text[start] in " \t":
        start += 1
    return start


def _line_starts(text: str, span: tuple[int, int]) -> Sequence[int]:
    """Return the positions at which the lines of a block begin."""
    begin, end = span
    starts = [begin]
    while (newline := text.find("\n", starts[-1], end)) >= 0:
        starts.append(newline + 1)
    return starts
