"""Compares turns with a kept key-value cache to turns that read the history again: `python -m benchmarks.generation`.

Both ways sample the same conversations greedily with the same model, a Qwen2 with random weights. The other way is
TRL's own `_generate_single_turn`, which TRL's tool loop calls in each turn with the whole history.
"""

import argparse
import statistics
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import PAD, finish, interleaved, random_qwen2, ratio
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_tokenizer


def main() -> None:
    options = _options()
    rows = [_row(options, new_tokens) for new_tokens in options.new_tokens]
    finish({"benchmark": "generation", "threads": torch.get_num_threads(), "rows": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=800, help="number of tokens of the prompt")
    parser.add_argument("--observation", type=int, default=60, help="number of tokens between two turns")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[25, 100], help="sampled tokens of each turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 64; 768 gives about 100 M parameters")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _row(options: argparse.Namespace, new_tokens: int) -> dict:
    trainer = _trainer(options, new_tokens)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, options.vocab, (options.batch, options.prompt), generator=draw).tolist()
    observations = torch.randint(
        3, options.vocab, (options.turns, options.batch, options.observation), generator=draw
    ).tolist()

    def converse(turn_of) -> list[list[int]]:
        histories = [list(prompt) for prompt in prompts]
        for turn in range(options.turns):
            sampled = turn_of(histories)
            assert all(len(ids) == new_tokens for ids in sampled)
            between = observations[turn] if turn + 1 < options.turns else [[]] * options.batch
            histories = [h + s + o for h, s, o in zip(histories, sampled, between, strict=True)]
        return histories

    def reprefill() -> list[list[int]]:
        return converse(lambda histories: trainer._generate_single_turn(histories, None, {}, 1)[0])

    def ours() -> list[list[int]]:
        generate = TransformersGenerate(
            trainer.model, trainer.generation_config, trainer.eos_token_ids, PAD, kv_cache_tokens=2**18
        )

        def turn_of(histories: list[list[int]]) -> list[list[int]]:
            requests = [
                TurnRequest(trajectory=row, ids=ids, max_new_tokens=new_tokens) for row, ids in enumerate(histories)
            ]
            return [turn.ids for turn in generate(requests)]

        return converse(turn_of)

    seconds, histories = interleaved({"reprefill": reprefill, "ours": ours}, options.repeats)
    return {
        "new_tokens": new_tokens,
        "reprefill_s": statistics.median(seconds["reprefill"]),
        "ours_s": statistics.median(seconds["ours"]),
        "ratio": ratio(seconds["reprefill"], seconds["ours"]),
        "identical_greedy": histories["reprefill"] == histories["ours"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def _trainer(options: argparse.Namespace, new_tokens: int) -> GRPOTrainer:
    model = random_qwen2(
        options.vocab,
        layers=options.layers,
        hidden=options.hidden,
        heads=options.hidden // 64,
        intermediate=options.hidden * 8 // 3,
    )
    args = GRPOConfig(
        tempfile.mkdtemp(),
        max_completion_length=new_tokens,
        generation_kwargs={"do_sample": False, "min_new_tokens": new_tokens},
        per_device_train_batch_size=options.batch,
        num_generations=options.batch,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "-"}]}])
    tokenizer = tiny_tokenizer()
    return GRPOTrainer(
        model, [lambda completions, **_: [0.0] * len(completions)], args, rows, processing_class=tokenizer
    )


if __name__ == "__main__":
    main()
