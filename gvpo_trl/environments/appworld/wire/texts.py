"""Rules for texts that every process keeps: how a long output is cut, how lone surrogates are written."""


def printable(text: str) -> str:
    """The text with lone surrogates spelled out, which neither a log nor a tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut_output(text: str, limit: int, whole: bool = True) -> str:
    """The first `limit` characters of a text, with a last line that says how many were cut.

    Args:
        text: what was printed.
        limit: in characters.
        whole: whether the text had not been cut before.
    """
    if whole and len(text) <= limit:
        return text
    return text[:limit] + f"\n[{'' if whole else 'at least '}{max(1, len(text) - limit)} characters more were cut]"
