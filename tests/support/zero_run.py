"""Runs one of two ranks under DeepSpeed's ZeRO-3: `torchrun … zero_run.py FOLDER` writes FOLDER/rankN.json.

Accelerate does not support DeepSpeed on a CPU, so this script makes DeepSpeed's engine itself.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import distributed
from transformers import GenerationConfig

from gvpo_trl.generation.transformers import TransformersGenerate
from tests.support.fsdp_run import ROUNDS, turns
from tests.support.tiny import tiny_model, tiny_tokenizer

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    rank = distributed.get_rank()
    tokenizer = tiny_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=end, pad_token_id=pad)
    alone = TransformersGenerate(tiny_model(tokenizer).eval(), config, [end], pad, kv_cache_tokens=1000)
    model = tiny_model(tokenizer)
    engine, *_ = deepspeed.initialize(model=model, config=ZERO3, optimizer=torch.optim.SGD(model.parameters()))
    model.eval()
    forwards = []
    model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    generate = TransformersGenerate(engine.module, config, [end], pad, kv_cache_tokens=1000, equal_forwards=True)
    sampled = turns(generate, ROUNDS[rank])
    generate.wait_for_ranks()
    result = {
        "sharded": all(parameter.numel() == 0 for parameter in model.parameters()),
        "same": sampled == turns(alone, ROUNDS[rank]),
        "generation_forwards": len(forwards),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
