"""Rules for texts that every process keeps: how a long output is cut, how lone surrogates are written."""


def printable(text: str) -> str:
    """The text with lone surrogates spelled out, which neither a log nor a tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut_output(text: str, limit: int, whole: bool = True, length: int = 0) -> str:
    """The first `limit` characters of a text, with a last line that says how many were cut.

    Args:
        text: what was printed.
        limit: in characters.
        whole: whether the text had not been cut before.
        length: characters of the whole text, if `text` is only its beginning.
    """
    if whole and len(text) <= limit:
        return text
    more = max(1, max(length, len(text)) - limit)
    return text[:limit] + f"\n[{'' if whole else 'at least '}{more} characters more were cut]"
