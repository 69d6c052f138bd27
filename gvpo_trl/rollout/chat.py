"""Translates between messages and token ids: the prompt, the bridge between two turns, the tokens of a turn's code.

Sampled ids are never decoded and encoded again. The template renders the prompt, and what follows an assistant
message. The latter comes from a short conversation with a placeholder for the turn, so a template that rewrites
earlier turns (Qwen3's removes their thinking) cannot change what the model saw.

Only text of the template becomes control tokens. A control string in a message or an observation (`<|im_end|>`) is
encoded as its letters.
"""

import contextlib
import re
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from gvpo_trl.rollout.code import Code
from gvpo_trl.text import spelled_out

DEFAULT_DATE = datetime(2023, 5, 18, 12)
"""The date that a template writes for a task without a date. It is the date of AppWorld's worlds."""
MAX_LOCATED_BLOCKS = 16
"""Code blocks of a turn whose tokens are located one by one. Each block costs a search, so the number is bounded."""
THOUGHT_TAGS = ("<think>", "</think>")
"""The tags around a thought, whose code is not run."""
_SENTINEL = "gvpo-assistant-turn"
_OBSERVATION = "gvpo-observation"
_PLACEHOLDERS = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}]
_CUT = "\n[… {left_out} of {total} tokens left out …]\n"
_NOT_KEPT = (
    "The chat template does not keep the text of a message (role {role}), so turns cannot be joined; use a template "
    "that renders every message's content."
)
# This macro replaces transformers' `strftime_now`, because transformers passes no functions to a template.
_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ gvpo_dates[format] if format in gvpo_dates else gvpo_dates[''] }}"
    "{% endmacro %}\n"
)
_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(?:'([^']*)'|"([^"]*)")""")


class Chat:
    """The chat template of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        end_ids: ids that end a turn (TRL's `eos_token_ids`). The token that the template writes behind an assistant
            message ends a turn as well.
        template: a template to use instead of the tokenizer's own.
        template_kwargs: passed to every rendering (`enable_thinking`, …).

    Raises:
        ValueError: the tokenizer has no chat template, the template does not keep the text of a message, or no token
            ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int],
        *,
        template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"The tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template, which a multi-turn "
                "rollout needs; set tokenizer.chat_template, or take an instruction-tuned model's tokenizer."
            )
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        source = tokenizer.get_chat_template(template)
        self._writes_date = "strftime_now" in source
        if self._writes_date:
            self._kwargs["chat_template"] = _DATE_MACRO + source
            self._date_formats = {single or double for single, double in _DATE_FORMAT.findall(source)}
        elif template is not None:
            self._kwargs["chat_template"] = template
        added = tokenizer.added_tokens_decoder.items()
        self._thought_tags = {
            number: token.content for number, token in added if token.special and token.content in THOUGHT_TAGS
        }
        self._controls: tuple[str, ...] = ()
        self._specials: tuple[str, ...] = ()
        self._closing, kept, self._opening = self._after_assistant(_OBSERVATION).partition(_OBSERVATION)
        if not kept:
            raise ValueError(_NOT_KEPT.format(role="user"))
        self._closing_ids = self._template_ids(self._closing)
        self._controls, self._specials = self._control_strings()
        self.end_ids = self._turn_ends(frozenset(end_ids) - {None})
        """Ids that end a turn. A generator must stop at each of them."""

    def prompt_ids(self, messages: list[dict[str, Any]], now: datetime | str | None = None) -> list[int]:
        """Return the ids (P,) of the prompt with the template's generation prompt behind it.

        Args:
            messages: the conversation.
            now: the date that a template may write, a string in ISO format; `DEFAULT_DATE` for `None`.

        Raises:
            ValueError: the template refuses the messages (some templates support no system message), or it writes a
                date and `now` is none.
        """
        mark = _new_mark()
        if any(isinstance(message.get("content"), list) for message in messages) and not self._takes_parts():
            messages = [message | {"content": _joined_parts(message.get("content"))} for message in messages]
        roles = [message.get("role") for message in messages]
        shielded = [
            self._shielded(message, mark, role) | {"role": role} for message, role in zip(messages, roles, strict=True)
        ]
        return self._joined_ids(self._render(shielded, now), mark)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without control tokens. This text is never encoded again.

        The tags of a thought stay, also where a tokenizer has them as control tokens: code in a thought is not run.
        """
        text, start = "", 0
        for place, token in enumerate(ids) if self._thought_tags else ():
            if token in self._thought_tags:
                text += self._plain_text(ids[start:place]) + self._thought_tags[token]
                start = place + 1
        return text + self._plain_text(ids[start:])

    def _plain_text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def bridge(self, action_ids: Sequence[int], observation: str) -> list[int]:
        """Return the ids (U,) that the template puts between a turn and the next one.

        These are the end of the assistant message as far as the model did not sample it, the observation as a user
        message, and the generation prompt.
        """
        mark = _new_mark()
        ids = self._joined_ids(self._after_assistant(self._shielded(observation, mark, "user")), mark)
        end = action_ids[-1] if action_ids else None
        if end in self.end_ids and end in self._closing_ids:
            # The bridge begins behind the end-of-turn token; some templates write white space before it.
            return ids[ids.index(end) + 1 :]
        return ids

    def cut(self, text: str, max_tokens: int) -> str:
        """Return at most `max_tokens` tokens of a text: its head, its tail, and between them how much is left out."""
        text = spelled_out(text)
        head_ids, read = self._encoded_end(text, max_tokens)
        if len(head_ids) <= max_tokens:
            return text
        whole = read == len(text)
        tail_ids = head_ids if whole else self._encoded_end(text, max_tokens, tail=True)[0]
        about, total = "" if whole else "about ", len(head_ids) * len(text) // read
        keep, step = max_tokens, 1
        while True:
            # A cut inside a character leaves a replacement character at the seam.
            head = self._decode(head_ids[: (keep + 1) // 2]).rstrip("\ufffd")
            tail = self._decode(tail_ids[len(tail_ids) - keep // 2 :]).lstrip("\ufffd")
            notice = _CUT.format(left_out=f"{about}{total - keep}", total=f"{about}{total}")
            excess = len(self._encode(head + notice + tail)) - max_tokens
            if excess <= 0:
                return head + notice + tail
            if keep == 0:  # The notice alone is longer than the budget.
                break
            keep, step = max(0, keep - max(excess, step)), 2 * step
        while len(self._encode(notice)) > max_tokens:
            notice = notice[:-1]
        return notice

    def _encoded_end(self, text: str, max_tokens: int, tail: bool = False) -> tuple[list[int], int]:
        """Encode one end of a text, so that a text of megabytes is not encoded whole.

        Returns:
            More than `max_tokens` ids, or all ids of the text, and the number of characters that they hold.
        """
        size = 16 * max_tokens
        while True:
            piece = text[-size:] if tail else text[:size]
            ids = self._encode(piece)
            if len(ids) > max_tokens or len(piece) == len(text):
                return ids, len(piece)
            size *= 4

    def token_spans(self, ids: Sequence[int], code: Code) -> tuple[tuple[int, int], ...]:
        """Return half-open token ranges that cover the code's character ranges in `text(ids)`.

        In a turn with more than `MAX_LOCATED_BLOCKS` blocks, the last range covers all further blocks and the text
        between them.
        """
        text = self.text(ids)
        located = [*code.spans[:MAX_LOCATED_BLOCKS]]
        if len(code.spans) > MAX_LOCATED_BLOCKS:
            located[-1] = (located[-1][0], code.spans[-1][1])
        spans = []
        for start, end in located:
            first = self._tokens_of(ids, text[:start])
            if first and len(self.text(ids[:first])) > start:  # The last token holds the code's first letters as well.
                first -= 1
            spans.append((first, self._tokens_of(ids, text[:end])))
        return tuple(spans)

    def _tokens_of(self, ids: Sequence[int], prefix: str) -> int:
        """Return the smallest number of leading ids whose text begins with the whole prefix."""

        def complete(count: int) -> bool:
            return self.text(ids[:count]).startswith(prefix)

        count = bisect_left(range(len(ids)), True, key=complete)
        # A byte-fallback tokenizer decodes no character of a run of byte tokens while the last one is incomplete, so
        # `complete` is not monotonic inside a run. A character has at most four bytes, so at least one of four counts
        # in a row ends with a whole character.
        if any(map(complete, range(max(0, count - 4), count))):
            windows = [range(start, min(start + 4, count)) for start in range(count)]
            first = bisect_left(windows, True, key=lambda window: any(map(complete, window)))
            count = next(filter(complete, windows[first]))
        return count

    def _after_assistant(self, observation: str) -> str:
        """Return what the template writes after an assistant message that an observation follows."""
        return self._after_sentinel([*_PLACEHOLDERS, {"role": "user", "content": observation}])

    def _after_sentinel(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        _, kept, suffix = self._render(messages, **kwargs).partition(_SENTINEL)
        if not kept:
            raise ValueError(_NOT_KEPT.format(role="assistant"))
        return suffix

    def _render(
        self, messages: list[dict[str, Any]], now: datetime | str | None = None, add_generation_prompt: bool = True
    ) -> str:
        kwargs = self._kwargs
        if self._writes_date:  # The `strftime_now` of transformers gives the date of the host.
            date = _date_of(now)
            dates = {form: date.strftime(form) for form in self._date_formats} | {"": date.date().isoformat()}
            kwargs = kwargs | {"gvpo_dates": dates}
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except Exception as error:  # A template may raise anything.
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"The chat template does not take the messages ({roles}): {error}") from error

    def _takes_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts, which Jinja else writes as Python does."""
        try:
            text = self._render([{"role": "user", "content": [{"type": "text", "text": _OBSERVATION}]}])
        except ValueError:
            return False
        return _OBSERVATION in text and f"'{_OBSERVATION}'" not in text

    def _control_strings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the strings that become control tokens, and those of them that are special tokens.

        Control tokens are the special tokens, and the tokens in brackets that the template writes. Other added tokens
        are words that the tokenizer keeps whole, also in messages and observations.
        """
        frame = self._closing + self._opening
        for roles in (["user"], ["system", "user"]):
            try:
                frame += self._render([{"role": role, "content": "."} for role in roles])
            except ValueError:  # Some templates support no system message.
                continue
        added = [token for token in self.tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        specials = tuple(token.content for token in added if token.special)
        written = (token.content for token in added if token.content[0] in "<[" and token.content in frame)
        return (*specials, *(content for content in written if content not in specials)), specials

    def _turn_ends(self, end_ids: frozenset[int]) -> frozenset[int]:
        """Return the given ids and the first control token that the template writes behind an assistant message."""
        closings = [self._closing]
        with contextlib.suppress(ValueError):
            last = self._after_sentinel(_PLACEHOLDERS, add_generation_prompt=False)
            # Some templates write another token behind the last message. Others always write a generation prompt.
            if last != self._after_sentinel(_PLACEHOLDERS):
                closings.insert(0, last)
        ids = [token for closing in closings for token in self._template_ids(closing)]
        controls = {self.tokenizer.convert_tokens_to_ids(control) for control in self._controls} | end_ids
        closing_id = next((token for token in ids if token in controls), None)
        if closing_id is None:
            closing = next((closing.strip() for closing in closings if closing.strip()), "")
            names = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(sorted(end_ids))))
            raise ValueError(
                f"The chat template ends an assistant message with {closing!r}, which is no single token of this "
                f"tokenizer, and not with {names}, so no token would end a turn. Add the closing text to "
                "the tokenizer as a special token, or put the end-of-sequence token behind the template's assistant "
                "messages."
            )
        return end_ids | {closing_id}

    def _shielded(self, value: Any, mark: str, role: str) -> Any:
        """Return a message's content with a mark inside every control string.

        An assistant's message keeps tokens that are not special, such as `<think>`, which the template may look for.
        """
        if isinstance(value, str):
            controls = self._specials if role == "assistant" else self._controls
            return mark.join(self._pieces(spelled_out(value), controls))
        if isinstance(value, list):
            return [self._shielded(part, mark, role) for part in value]
        if isinstance(value, dict):
            return {name: part if name == "type" else self._shielded(part, mark, role) for name, part in value.items()}
        return value

    def _pieces(self, text: str, controls: Sequence[str]) -> list[str]:
        """Split the text after the first letter of every control string in it."""
        present = [re.escape(control) for control in controls if control in text]
        if not present:
            return [text]
        starts = [match.start() + 1 for match in re.finditer(f"(?={'|'.join(present)})", text)]
        return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]

    def _joined_ids(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered text whose marks are removed after they have split its control strings."""
        return self._ids_of_pieces(text.split(mark))

    def _ids_of_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of a text that is split inside its control strings."""
        ids = self._template_ids(pieces[0])
        for piece in pieces[1:]:
            # Some tokenizers put a space before a text. A full stop takes it in place of the piece.
            stop, more = self._template_ids("."), self._template_ids(f".{piece}")
            ids += more[len(stop) :] if more[: len(stop)] == stop else self._template_ids(piece)
        return ids

    def _template_ids(self, text: str) -> list[int]:
        """Return the ids of text that the template wrote, with its control tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, text: str) -> list[int]:
        """Return the ids of text that the template did not write, without control tokens."""
        return self._ids_of_pieces(self._pieces(text, self._controls))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _date_of(now: Any) -> datetime:
    """Return a task's date, which may come from any data set.

    Raises:
        ValueError: the value is no date.
    """
    if now is None or isinstance(now, datetime):
        return now or DEFAULT_DATE
    try:
        return datetime.fromisoformat(str(now))
    except ValueError:
        raise ValueError(
            f"The chat template writes the date, but the task's datetime {now!r} is no date in ISO format; mend the "
            "data set's column 'datetime', or leave it out."
        ) from None


def _joined_parts(content: Any) -> Any:
    """Return the text of a content whose parts are all texts; any other content stays as it is."""
    is_text = isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content)
    return "".join(part["text"] for part in content) if is_text else content


def _new_mark() -> str:
    """Return a string that no text holds by chance: 128 random bits as private-use characters without a case."""
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))
