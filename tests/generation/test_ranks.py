"""Under FSDP and ZeRO-3 a forward is a collective call, so all ranks run the same number of forwards."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from gvpo_trl.generation.ranks import Ranks, needs_equal_forwards
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def run_two(script: str, folder: Path) -> list[dict]:
    """Run the script on two ranks whose turns differ in number and length, and return the results of both."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [*command, str(ROOT / "tests/support" / script), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """The results of two ranks under FSDP2."""
    return run_two("fsdp_run.py", tmp_path_factory.mktemp("fsdp"))


def test_ranks_of_a_sharded_model_run_the_same_number_of_forwards(ranks):
    zero, one = ranks
    assert zero["sharded"]
    assert zero["generation_forwards"] == one["generation_forwards"] == 2 + 3 + 4 + 5 + 1
    assert zero["forwards"] == one["forwards"]


def test_ranks_of_a_sharded_model_sample_the_tokens_of_the_whole_model(ranks):
    assert [rank["same"] for rank in ranks] == [True, True]


def test_ranks_of_a_sharded_model_train_on_trajectories_of_unequal_turns(ranks):
    zero, one = ranks
    assert zero["log"][0]["rollout/turns"] == (1 + 4) / 2
    assert zero["moved"]
    assert zero["weights"] == one["weights"]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_ranks_under_zero3_run_the_same_number_of_forwards(tmp_path):
    zero, one = run_two("zero_run.py", tmp_path)
    assert zero["sharded"]
    assert zero["generation_forwards"] == one["generation_forwards"] == 2 + 3 + 4 + 5 + 1
    assert [zero["same"], one["same"]] == [True, True]


@pytest.mark.parametrize(
    ("sharded", "processes", "expected"), [(True, 2, True), (True, 1, False), (False, 2, False), (False, 1, False)]
)
def test_which_models_need_equal_forwards(sharded, processes, expected):
    assert needs_equal_forwards(torch.nn.Module(), is_sharded=sharded, processes=processes) == expected


class _Others(Ranks):
    """Stands in for ranks that sample in the next `len(plan)` calls. An entry says whether one of them reads."""

    def __init__(self, plan):
        super().__init__(torch.device("cpu"), together=True)
        self.plan, self.flags = list(plan), []

    def any(self, *flags):
        self.flags.append(flags)
        others = (True, self.plan.pop(0)) if self.plan else (False, False)
        return [mine or theirs for mine, theirs in zip(flags, others, strict=True)]


def test_a_rank_that_is_done_takes_part_until_all_are(monkeypatch):
    model = tiny_model(tiny_tokenizer()).eval()
    generated, forwards = [], []
    generate = model.generate

    def recorded(*args, synced_gpus, **kwargs):
        generated.append(synced_gpus)
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", recorded)
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    config = GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0)
    others = _Others([True, False, True])
    monkeypatch.setattr("gvpo_trl.generation.transformers.Ranks", lambda device, together: others)
    ours = TransformersGenerate(model, config, [2], 0, kv_cache_tokens=1000, equal_forwards=True)
    ours([TurnRequest(trajectory=0, ids=[5, 6, 7], max_new_tokens=2)])
    assert (len(forwards), generated) == (1 + 2, [True])  # another rank reads, then two tokens are sampled
    ours.wait_for_ranks()
    assert generated == [True] * 3
    assert len(forwards) == 3 + (0 + 1) + (1 + 1)
    assert others.flags == [(True, False), (False, False), (False, False), (False, False)]


def test_a_rank_alone_waits_for_nobody():
    model = tiny_model(tiny_tokenizer()).eval()
    ours = TransformersGenerate(model, GenerationConfig(do_sample=False, pad_token_id=0), [2], 0)
    ours.wait_for_ranks()
    assert Ranks(torch.device("cpu"), together=False).any(True, False) == [True, False]
