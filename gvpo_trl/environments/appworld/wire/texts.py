"""Rules for texts that every process follows: how a long output is cut and how lone surrogates are written."""

from gvpo_trl.text import spelled_out

__all__ = ["cut_output", "spelled_out"]


def cut_output(text: str, limit: int, whole: bool = True, length: int = 0) -> str:
    """Return the first `limit` characters of a text, with a last line that says how many were cut.

    Args:
        text: the printed text.
        limit: the most characters that are kept.
        whole: whether the text had not been cut before.
        length: characters of the whole text, if `text` is only its beginning.
    """
    if whole and len(text) <= limit:
        return text
    more = max(1, max(length, len(text)) - limit)
    return text[:limit] + f"\n[{'' if whole else 'at least '}{more} characters more were cut]"
