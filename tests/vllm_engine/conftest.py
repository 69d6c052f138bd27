"""Tests with the real vLLM on a CPU (`make test-vllm`). Without vLLM, pytest collects none of them.

The folder is not called `vllm`: pytest puts `tests` on the import path, where that name would hide a missing package.
"""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.tiny import tiny_tokenizer

if importlib.util.find_spec("vllm"):
    import tests.support.vllm_cpu  # noqa: F401 - sets the environment
else:
    collect_ignore_glob = ["test_*.py"]

CONTEXT = 1024


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen2 model with random weights and heads wide enough for vLLM's attention on a CPU."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def one_engine():
    """Make TRL's colocated engine once for all trainers, and make weight syncs work on a CPU.

    On a CPU, vLLM packs linear weights and drops the originals, into which a sync would load the trainer's weights.
    All trainers here start from the same model, and each of them syncs before its first rollout.
    """
    import vllm.model_executor.layers.utils as layers
    from trl.generation import vllm_generation

    def keep_weights(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    make = functools.cache(functools.partial(vllm_generation.LLM, enforce_eager=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "dispatch_cpu_unquantized_gemm", keep_weights)
        patch.setattr(vllm_generation, "LLM", make)
        yield
