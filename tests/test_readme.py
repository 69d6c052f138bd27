"""The README's examples run as pasted: its shell commands and its scripts, in their order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## In Python\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
LARGE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
SCRIPTS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    shlex.split(line, comments=True) for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line
]


def run(command: list[str], folder: Path) -> str:
    """Run a command offline in a folder, and return all that it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def test_the_section_holds_what_these_tests_run():
    assert [LARGE_MODEL in script for script in SCRIPTS] == [False, True]
    assert all(command[0] == "gvpo-trl" for command in COMMANDS)
    assert [command[1] for command in COMMANDS] == ["appworld", "appworld", "view", "train", "evaluate", "view"]


@pytest.mark.slow
@pytest.mark.usefixtures("appworld_venv")
def test_the_first_example_runs_as_pasted(tmp_path):
    """The two commands make what is missing, the script logs every step, and the viewer shows its trajectories."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for command in COMMANDS[:2]:
        run([sys.executable, "-m", "gvpo_trl", *command[1:]], tmp_path)
    (tmp_path / "first.py").write_text(SCRIPTS[0], encoding="utf-8")
    printed = run([sys.executable, "first.py"], tmp_path)
    steps = int(re.search(r"max_steps=(\d+)", SCRIPTS[0])[1])
    assert len(re.findall(r"grad_norm|\bstep \d+", printed)) >= steps, printed[-3000:]
    assert (tmp_path / "runs/first" / f"checkpoint-{steps}" / "model.safetensors").is_file()
    shown = run([sys.executable, "-m", "gvpo_trl", *COMMANDS[2][1:]], tmp_path)
    assert "-- turn 1, " in shown and "```python" in shown


@pytest.mark.usefixtures("appworld_venv")
def test_the_large_example_builds_its_trainer(tmp_path, pocket_root):
    """Everything up to the training, with the small model and the pocket data in the place of what is not here."""
    script = SCRIPTS[1].replace(LARGE_MODEL, str(ROOT / "recipes/quickstart/model"))
    script = script.replace("/data/appworld", str(pocket_root)).replace("trainer.train()", "print(trainer.model)")
    script = script.replace("learning_rate=5e-5", "learning_rate=5e-5, use_cpu=True, bf16=False")
    (tmp_path / "large.py").write_text(script, encoding="utf-8")
    assert "lora_A" in run([sys.executable, "large.py"], tmp_path)


@pytest.mark.parametrize("command", COMMANDS[3:5], ids=lambda command: command[1])
def test_the_commands_options_are_known(command, monkeypatch):
    from gvpo_trl.cli.config import parse_config

    monkeypatch.chdir(ROOT)
    _, _, model_args = parse_config(command[1], [*command[2:], "--use_vllm", "false", "--bf16", "false"])
    assert model_args.model_name_or_path == LARGE_MODEL
