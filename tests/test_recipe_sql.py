"""The recipe with SQL: the tokenizer, the experts, the warm start from nothing, and a shortened benchmark."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from gvpo_trl.environments.sql import load_tasks
from gvpo_trl.environments.sql.databases import DIFFICULTIES
from gvpo_trl.environments.sql.engine import Database, Limits, right_values
from gvpo_trl.environments.sql.tasks import SYSTEM, load_task
from recipes.sql.experts import Habits, script
from recipes.sql.tokenizer import build_tokenizer, value_tokens

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "recipes" / "sql" / "model"


def run_module(module: str, *arguments: object) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def play(task, queries: list[str]) -> tuple[list, float]:
    """Return the failures and the reward of a script."""
    database = Database(task.tables, Limits())
    failures, answer = [], None
    for query in queries:
        result = database.run(query)
        failures.append(result.failure)
        answer = result.answer
        if answer is not None:
            break
    right = right_values(answer, task.answer)
    return failures, sum(right) / len(right)


def test_the_tokenizer_is_lossless_and_each_word_is_one_token():
    tokenizer = build_tokenizer()
    for text in (SYSTEM, 'é日本 \t foo  bar\r\n"no"', "CREATE TABLE t_guard (id INTEGER)\nNova | red | 364 | 36"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for word in value_tokens():
        assert len(tokenizer(word)["input_ids"]) == 1, word
    assert len(tokenizer(SYSTEM)["input_ids"]) < 12
    assert len(tokenizer("364")["input_ids"]) == 3, "a part of a number is no token"


def test_careful_experts_win_and_sloppy_ones_fail_at_times():
    careful = Habits(slip=0, skip_schema=0, wrong_end=0)
    for difficulty in DIFFICULTIES:
        rng, rewards, failures = random.Random(0), [], []
        for task_id in load_tasks("warm", (difficulty,), count=60)["task_id"]:
            task = load_task(task_id)
            assert script(task, careful, rng) == list(task.queries)
            failed, reward = play(task, script(task, Habits(), rng))
            rewards.append(reward)
            failures += failed
        failing = sum(failure is not None for failure in failures) / len(failures)
        assert 0.4 < sum(reward == 1 for reward in rewards) / len(rewards) < 0.9
        assert 0.2 < failing < 0.5
        assert len({failure for failure in failures if failure}) >= 2, "syntax and runtime errors"


def test_wrong_ends_are_wrong():
    wrong = Habits(slip=0, skip_schema=0, wrong_end=1)
    rng = random.Random(1)
    tasks = [load_task(task_id) for task_id in load_tasks("warm", (1, 2, 3), count=60)["task_id"]]
    assert not any(play(task, script(task, wrong, rng))[1] == 1 for task in tasks)


def test_the_committed_agent_is_small_and_fits_its_tokenizer():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (MODEL / "model.safetensors").stat().st_size < 3_000_000
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    made = build_tokenizer()
    # transformers adds `<|endoftext|>` to any tokenizer that it loads beside a Qwen2; no text is encoded with it.
    assert made.get_vocab().items() <= tokenizer.get_vocab().items()
    assert len(made) == model.get_input_embeddings().num_embeddings


def test_the_warm_start_is_made_from_nothing(tmp_path):
    from transformers import AutoModelForCausalLM

    run_module("recipes.sql.warm_start", "--output", tmp_path, "--episodes", 12, "--steps", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000


def test_the_benchmark_in_short():
    short = {
        "databases": 1, "repeats": 1, "max_steps": 2, "max_train_tasks": 3, "max_eval_tasks": 3, "eval_samples": 1,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_turns": 3,
    }  # fmt: skip
    printed = run_module("benchmarks.sql", *(part for name, value in short.items() for part in (f"--{name}", value)))
    result = json.loads(printed.splitlines()[-1])
    assert result["steps_per_second"] > 0 and result["optimizer_steps"] == 2
    assert 0 <= result["success_before"] <= 1 and 0 <= result["success_after"] <= 1
    assert 0 <= result["held_out_success_before"] <= 1 and 0 <= result["held_out_success_after"] <= 1
    assert result["seconds"] > 0
