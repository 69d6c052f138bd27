"""Between messages and token ids: the prompt, the bridge between two turns, the tokens of a turn's code.

Sampled ids are never decoded and encoded again. The template is rendered twice only: for the prompt, and for the
tokens that follow an assistant message; the latter from a two-message stand-in, so a template that rewrites earlier
turns (Qwen3 drops their thinking) cannot change what the model saw.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gvpo_trl.rollout.code import Code

_SENTINEL = "gvpo-assistant-turn"
_OBSERVATION = "gvpo-observation"
_CUT = "\n[… {left_out} of {total} tokens left out …]\n"
_NOT_KEPT = (
    "The chat template does not keep the text of a message (role {role}), so turns cannot be joined; use a template "
    "that renders every message's content."
)


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
        suffix = self._after_assistant(_OBSERVATION)
        self._closing, kept, self._opening = suffix.partition(_OBSERVATION)
        if not kept:
            raise ValueError(_NOT_KEPT.format(role="user"))
        self._controls = self._control_strings()

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """(P,) ids of the prompt with the template's generation prompt behind it.

        Raises:
            ValueError: when the template refuses the messages (some know no system message).
        """
        return self._template_ids(self._render(messages))

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, for reading and for the code in it; never encoded again."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def bridge(self, action_ids: Sequence[int], observation: str) -> list[int]:
        """(U,) what the template puts between a turn and the next one.

        The end of the assistant message as far as the model did not sample it, the observation as a user message, the
        generation prompt. Control tokens are the template's alone: an observation that spells one
        (`<|im_end|>`) gets the ids of its letters.
        """
        suffix = self._after_assistant(observation)
        fits = suffix.startswith(self._closing) and suffix.endswith(self._opening)
        message = suffix[len(self._closing) : len(suffix) - len(self._opening)] if fits else observation
        if len(self._pieces(message)) > 1:
            ids = self._template_ids(self._closing) + self._encode(message) + self._template_ids(self._opening)
        else:  # in one go, so that letters merge as they do in the template's own rendering
            ids = self._template_ids(self._closing + message + self._opening)
        end = action_ids[-1] if action_ids else None
        if end in self.end_ids and end in self._template_ids(self._closing):
            # Up to the first end-of-turn token: some templates put white space before it.
            return ids[ids.index(end) + 1 :]
        return ids

    def cut(self, text: str, max_tokens: int) -> str:
        """Keep the head and the tail of a text that has more tokens than allowed, and say in it what was left out."""
        head_ids, read = self._enough(text, max_tokens)
        if len(head_ids) <= max_tokens:
            return text
        whole = read == len(text)
        tail_ids = head_ids if whole else self._enough(text, max_tokens, tail=True)[0]
        about, total = "" if whole else "about ", len(head_ids) * len(text) // read
        keep = max_tokens
        while True:
            # A cut inside a character leaves a replacement character at the seam.
            head = self._decode(head_ids[: (keep + 1) // 2]).rstrip("\ufffd")
            tail = self._decode(tail_ids[len(tail_ids) - keep // 2 :]).lstrip("\ufffd")
            notice = _CUT.format(left_out=f"{about}{total - keep}", total=f"{about}{total}")
            excess = len(self._encode(head + notice + tail)) - max_tokens
            if excess <= 0:
                return head + notice + tail
            if keep == 0:  # the notice alone is over the budget
                break
            keep = max(0, keep - excess)
        while len(self._encode(notice)) > max_tokens:
            notice = notice[:-1]
        return notice

    def _enough(self, text: str, max_tokens: int, tail: bool = False) -> tuple[list[int], int]:
        """More than `max_tokens` ids from one end of a text, or all of them, and how many characters they hold.

        A text of megabytes is not encoded whole only to be thrown away.
        """
        size = 16 * max_tokens
        while True:
            piece = text[-size:] if tail else text[:size]
            ids = self._encode(piece)
            if len(ids) > max_tokens or len(piece) == len(text):
                return ids, len(piece)
            size *= 4

    def token_spans(self, ids: Sequence[int], code: Code) -> tuple[tuple[int, int], ...]:
        """Half-open token ranges that cover the code's character ranges in `text(ids)`."""
        text = self.text(ids)
        spans = []
        for start, end in code.spans:
            first = self._tokens_of(ids, text[:start])
            if first and len(self.text(ids[:first])) > start:  # this token holds the code's first letters as well
                first -= 1
            spans.append((first, self._tokens_of(ids, text[:end])))
        return tuple(spans)

    def _tokens_of(self, ids: Sequence[int], prefix: str) -> int:
        """The least number of leading ids whose text begins with the prefix, its last character complete."""

        def complete(count: int) -> bool:
            return self.text(ids[:count]).startswith(prefix)

        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if complete(middle) else (middle + 1, high)
        # Byte-fallback tokenizers give up on a whole run of byte tokens while its last character is incomplete, which
        # can hide a shorter answer; within a run there is one at most four ids, a character's bytes, before.
        while (earlier := next((count for count in range(max(0, low - 4), low) if complete(count)), None)) is not None:
            low = earlier
        return low

    def _after_assistant(self, observation: str) -> str:
        """What the template writes after an assistant message that an observation follows."""
        rendered = self._render(
            [
                {"role": "user", "content": "."},
                {"role": "assistant", "content": _SENTINEL},
                {"role": "user", "content": observation},
            ]
        )
        _, kept, suffix = rendered.partition(_SENTINEL)
        if not kept:
            raise ValueError(_NOT_KEPT.format(role="assistant"))
        return suffix

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._kwargs
            )
        except Exception as error:  # whatever a template raises, in a language of its own
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"The chat template does not take the messages ({roles}): {error}") from error

    def _control_strings(self) -> list[str]:
        """Strings that become control tokens: the special ones, and those in brackets that the template writes.

        Other added tokens are words that a tokenizer keeps whole, in observations as well.
        """
        frame = self._closing + self._opening
        return [
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if len(token.content) > 1 and (token.special or (token.content[0] in "<[" and token.content in frame))
        ]

    def _pieces(self, text: str) -> list[str]:
        """The text, parted after the first letter of every control string in it."""
        present = [re.escape(control) for control in self._controls if control in text]
        if not present:
            return [text]
        starts = [match.start() + 1 for match in re.finditer(f"(?={'|'.join(present)})", text)]
        return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]

    def _template_ids(self, text: str) -> list[int]:
        """The ids of what the template wrote, control tokens and all."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, text: str) -> list[int]:
        """The ids of a text that is not ours: never a control token."""
        return [token for piece in self._pieces(text) for token in self._template_ids(piece)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
