"""Tokenizers with the chat templates of model families, mostly with one token per byte."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import CHATML, SPECIAL, tiny_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "templates"
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ENDS = dict.fromkeys(("qwen2", "qwen2.5", "qwen3", "smollm2"), "<|im_end|>") | {"llama3": "<|eot_id|>"}
"""The end-of-turn token of each template in `tests/templates`."""


class CountingTokenizer:
    """Passes every call on to a tokenizer, and counts what it encodes and decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self.encoded = 0
        """Number of encoded characters."""
        self.decoded = 0
        """Number of decoded ids."""
        self.calls = 0

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **kwargs):
        self.calls += 1
        self.encoded += len(text) if isinstance(text, str) else sum(map(len, text))
        return self._tokenizer(text, **kwargs)

    def decode(self, ids, **kwargs) -> str:
        self.calls += 1
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **kwargs)


def with_special(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> PreTrainedTokenizerFast:
    """Add special tokens to a tokenizer and return it."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template of `tests/templates`, whose end-of-turn token is the eos token."""
    tokenizer = tiny_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), extra=("<think>", "</think>"))
    if name == "llama3":
        with_special(tokenizer, *LLAMA_TOKENS)
        tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.eos_token = ENDS[name]
    return tokenizer


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's, with `▁` for a space and a token per ASCII character or other byte."""
    words = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    backend = Tokenizer(
        models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    with_special(fast, "<|im_start|>")
    fast.chat_template = CHATML
    return fast


def merging_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Return a ChatML tokenizer with one token per byte and one per merge, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    with_special(fast, "<|im_start|>")
    fast.chat_template = CHATML
    fast.padding_side = "left"
    return fast
