"""Helpers of the benchmarks: models with random weights, interleaved timing, and JSON on the last line."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PAD, END = 0, 2
"""Ids of the tiny tokenizer's pad and end-of-turn tokens."""


def random_qwen2(vocab_size: int, *, layers: int, hidden: int, heads: int, intermediate: int) -> Qwen2ForCausalLM:
    """Make a Qwen2 in float32 with random weights and two key-value heads; every call gives the same weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def interleaved(ways: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run each way in each repeat; return the seconds of each run, and each way's last result.

    The ways take turns, and each repeat begins with another way, so a machine that slows down slows all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    returned: dict[str, Any] = {}
    for repeat in range(repeats):
        first = repeat % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            started = time.perf_counter()
            returned[name] = ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds, returned


def ratio(above: list[float], below: list[float]) -> float:
    """Divide one way's time by the other's in each repeat, and return the median of these ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def finish(result: dict[str, Any]) -> None:
    """Print the result as the last line, with numbers rounded to three decimal places."""
    print(json.dumps(_rounded(result)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
