"""The quickstart recipe: the warm start from nothing, the committed agent, and the whole run in a shortened form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
REPORT_KEYS = {"tgc", "sgc", "reward", "failed_step_share", "docs_step_share", "turns_per_task", "tasks"}


def run_script(script: str, *arguments: object, timeout_s: float = 300) -> str:
    """Run a script of the recipe offline, and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(RECIPE / script), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_the_configuration_parses():
    """Every key is known, and two updates a generation make the importance ratio differ from 1."""
    from gvpo_trl.cli.config import parse_config

    script_args, training_args, model_args = parse_config("train", ["--config", str(RECIPE / "config.yaml")])
    assert script_args.appworld_root == "data/pocket" and model_args.model_name_or_path
    assert training_args.steps_per_generation > training_args.gradient_accumulation_steps
    assert training_args.save_steps % training_args.steps_per_generation == 0


def test_the_committed_agent_is_small_and_its_tokenizer_is_lossless():
    """The weights fit the repository, any text is encoded without a loss, and every value is one token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gvpo_trl.pocket.families import closed_sets

    weights = RECIPE / "model" / "model.safetensors"
    assert weights.stat().st_size <= 4_000_000
    model = AutoModelForCausalLM.from_pretrained(RECIPE / "model")
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "model")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    for text in ('é日本 \t foo  bar\r\n"Ana\'s Banana"', "token = apis.x.y()\n    ^^^^^~~", "Harbor 13 ana@mail.com"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for values in closed_sets().values():
        for value in values:
            assert len(tokenizer(f"a {value}.")["input_ids"]) <= 4, value


@pytest.mark.usefixtures("appworld_venv")
def test_the_warm_start_is_made_from_nothing(tmp_path: Path):
    """The command that made the committed agent, with few episodes and few steps."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_script("warm_start.py", "--output", tmp_path / "model", "--episodes", 16, "--steps", 3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Task"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


@pytest.fixture(scope="module")
def quickstart(pocket_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """One shortened run: its output folder and its arguments."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    short = {
        "output": folder, "appworld_root": pocket_root, "max_steps": 2, "max_eval_tasks": 3, "eval_samples": 1,
        "per_device_train_batch_size": 4, "num_generations": 4, "per_device_eval_batch_size": 3, "eval_steps": 2,
        "save_steps": 2, "max_turns": 3,
    }  # fmt: skip
    arguments = [part for name, value in short.items() for part in (f"--{name}", str(value))]
    run_script("run.py", *arguments)
    return folder, arguments


def test_the_run_leaves_a_report_and_a_figure(quickstart: tuple[Path, list[str]]):
    """`before` and `after` hold the figures that others read, and `seconds` has every phase."""
    folder, _ = quickstart
    report = json.loads((folder / "report.json").read_text())
    for part in ("before", "after"):
        assert set(report[part]) >= REPORT_KEYS
        assert report[part]["tasks"] == 3 and 0 <= report[part]["tgc"] <= 100
    assert {"evaluate_before", "train", "evaluate_after"} <= set(report["seconds"])
    assert report["peak_memory_mb"]["trainer"] > 0
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_shows_the_report_and_trains_nothing(quickstart: tuple[Path, list[str]]):
    """A second run makes nothing again that is there."""
    folder, arguments = quickstart
    written = (folder / "model.safetensors").stat().st_mtime_ns
    printed = run_script("run.py", *arguments, timeout_s=60)
    assert "before" in printed and "==>" not in printed
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
