"""Between messages and token ids: the prompt, the bridge between two turns, the code in a turn.

Sampled ids are never decoded and encoded again. The template is rendered twice only: for the prompt, and for the
tokens that follow an assistant message; the latter from a two-message stand-in, so a template that rewrites earlier
turns (Qwen3 drops their thinking) cannot change what the model saw.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SENTINEL = "gvpo-assistant-turn"
_FENCE = re.compile(r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[ \t]*$", re.MULTILINE)
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LANGUAGES = ("", "python", "py")
_CUT = "\n[… {left_out} of {total} tokens left out …]\n"


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a turn and where it stands in the turn's text."""

    source: str
    spans: tuple[tuple[int, int], ...]
    """Half-open character ranges of the blocks."""


def extract_code(text: str) -> Code | None:
    """Join the fenced blocks of a turn in order; `None` when there is nothing to run.

    A block is opened by a line of three backticks with `python`, `py` or nothing behind them; a last block may be left
    unclosed. Blocks of other languages and what stands inside `<think>` are skipped.
    """
    searched = _THINKING.sub(lambda match: " " * len(match.group()), text)
    sources, spans = [], []
    opened: tuple[str, int] | None = None
    for fence in _FENCE.finditer(searched):
        language = fence["language"].lower()
        if opened is None:
            opened = (language, min(fence.end() + 1, len(text)))
        elif not language:
            _add_block(text, opened, max(fence.start() - 1, opened[1]), sources, spans)
            opened = None
    if opened is not None:
        _add_block(text, opened, len(text), sources, spans)
    return Code("\n".join(sources), tuple(spans)) if sources else None


def _add_block(text: str, opened: tuple[str, int], end: int, sources: list[str], spans: list[tuple[int, int]]) -> None:
    language, start = opened
    source = text[start:end]
    if language in _LANGUAGES and source.strip():
        sources.append(source)
        spans.append((start, end))


class Chat:
    """The chat template of one tokenizer, as the rollout needs it.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        end_ids: ids that end a turn (TRL's `eos_token_ids`).
        template: a template to use instead of the tokenizer's own.
        template_kwargs: passed to every rendering (`enable_thinking`, …).

    Raises:
        ValueError: without a chat template, or when the template does not keep an assistant message's text.
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
        self.end_ids = frozenset(end_ids)
        self._kwargs = dict(template_kwargs or {})
        if template is not None:
            self._kwargs["chat_template"] = template
        self.bridge([], "checked at start")

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """(P,) ids of the prompt with the template's generation prompt behind it."""
        return list(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self._kwargs
            )["input_ids"]
        )

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, for reading and for the code in it; never encoded again."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def bridge(self, action_ids: Sequence[int], observation: str) -> list[int]:
        """(U,) what the template puts between a turn and the next one.

        The end of the assistant message as far as the model did not sample it, the observation as a user message, the
        generation prompt.
        """
        rendered = self.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "."},
                {"role": "assistant", "content": _SENTINEL},
                {"role": "user", "content": observation},
            ],
            add_generation_prompt=True,
            tokenize=False,
            **self._kwargs,
        )
        _, found, suffix = rendered.partition(_SENTINEL)
        if not found:
            raise ValueError(
                "The chat template does not keep the text of an assistant message, so turns cannot be joined; use a "
                "template that renders every message's content."
            )
        ids = list(self.tokenizer(suffix, add_special_tokens=False)["input_ids"])
        if action_ids and action_ids[-1] in self.end_ids and action_ids[-1] in ids:
            # Up to the first end-of-turn token: some templates put white space before it.
            return ids[ids.index(action_ids[-1]) + 1 :]
        return ids

    def cut(self, text: str, max_tokens: int) -> str:
        """Keep the head and the tail of a text that has more tokens than allowed, and say in it what was left out."""
        # A token is rarely longer than 16 characters: a text of megabytes is not encoded whole only to be thrown away.
        ids = self._encode(text[: 16 * max_tokens]) if len(text) > 64 * max_tokens else self._encode(text)
        if len(text) <= 64 * max_tokens and len(ids) <= max_tokens:
            return text
        total = len(ids) if len(text) <= 64 * max_tokens else len(text) * len(ids) // max(1, 16 * max_tokens)
        tail_ids = ids if len(text) <= 64 * max_tokens else self._encode(text[-16 * max_tokens :])
        keep = max_tokens
        while True:
            notice = _CUT.format(left_out=total - keep, total=total)
            head, tail = (keep + 1) // 2, keep // 2
            shortened = (
                self.tokenizer.decode(ids[:head], clean_up_tokenization_spaces=False)
                + notice
                + self.tokenizer.decode(tail_ids[len(tail_ids) - tail :], clean_up_tokenization_spaces=False)
            )
            excess = len(self._encode(shortened)) - max_tokens
            if excess <= 0:
                return shortened
            if keep <= 0:  # the notice alone is over the budget
                return self.tokenizer.decode(self._encode(notice)[:max_tokens], clean_up_tokenization_spaces=False)
            keep = max(0, keep - excess)

    def token_spans(self, ids: Sequence[int], code: Code) -> tuple[tuple[int, int], ...]:
        """Half-open token ranges that cover the code's character ranges in `text(ids)`."""
        return tuple((self._token_at(ids, start + 1) - 1, self._token_at(ids, end)) for start, end in code.spans)

    def _token_at(self, ids: Sequence[int], characters: int) -> int:
        """The least number of leading ids whose text has that many characters."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.text(ids[:middle])) >= characters:
                high = middle
            else:
                low = middle + 1
        return low

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
