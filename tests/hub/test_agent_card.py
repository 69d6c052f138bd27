"""The model card of an agent trained by the command line: its code runs as pasted, and its metadata are the Hub's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.support.hub import running_hub

ROOT = Path(__file__).resolve().parents[2]
MODEL = "someone/quick-agent"
SHORT = {
    "hub_model_id": MODEL,
    "push_to_hub": "true",
    "max_steps": "2",
    "steps_per_generation": "1",
    "num_generations": "2",
    "per_device_train_batch_size": "4",
    "per_device_eval_batch_size": "6",
    "max_train_tasks": "2",
    "max_eval_tasks": "3",
    "eval_steps": "1",
    "logging_steps": "1",
    "max_episodes": "6",
    "save_strategy": "no",
    "hub_benchmark": "someone/bench",
}
LORA = {"use_peft": "true", "lora_r": "4", "lora_target_modules": "all-linear"}


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LORA], ids=["model", "adapter"])
@pytest.mark.usefixtures("appworld_venv")
def test_the_code_in_the_card_runs_the_agent(pocket_root, tmp_path, options):
    with running_hub() as hub:
        environment = {**os.environ, **hub.client_env(str(tmp_path / "hf")), "PYTHONPATH": str(ROOT)}
        values = SHORT | options | {"output_dir": str(tmp_path / "run"), "appworld_root": str(pocket_root)}
        flags = [f"--{name}={value}" for name, value in values.items()]
        config = "recipes/quickstart/config.yaml"
        run([sys.executable, "-m", "gvpo_trl", "train", "--config", config, *flags], environment)
        text = hub.model(MODEL).files["README.md"].decode()
        assert ".eval_results/bench-dev.yaml" in hub.model(MODEL).files

        (code,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        (tmp_path / "pasted.py").write_text(code)
        printed = run([sys.executable, str(tmp_path / "pasted.py")], environment | {"APPWORLD_ROOT": str(pocket_root)})
    assert re.search(r"\d+ tests passed, \d+ failed", printed)
    assert "Output:\n```\n" in printed

    card = ModelCard(text)
    results = {result.metric_type: result for result in card.data.eval_results}
    assert results.keys() == {"task_goal_completion", "scenario_goal_completion", "reward"}
    assert {result.dataset_type for result in results.values()} == {"appworld-pocket"}
    assert card.data.library_name == ("peft" if options else "transformers")
    assert "The pocket data is not AppWorld's benchmark" in text
    assert "pocket data (split `train`)" in text
    assert "- appworld: 0.1.3" in text
    assert "the local model `recipes/quickstart/model`" in text
    assert card.data.base_model is None  # the Hub takes ids alone
    local = ModelCard.load(tmp_path / "run" / "README.md")
    assert local.data.to_dict() == card.data.to_dict()
    assert str(ROOT) not in text and str(tmp_path) not in text
