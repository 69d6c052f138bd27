"""Ctrl-C during `gvpo-trl train` prints the command that goes on, and that command does."""

import shlex

import pytest
from transformers import TrainerCallback

from gvpo_trl import GVPOTrainer
from gvpo_trl.cli.main import main
from gvpo_trl.cli.run import how_to_resume
from tests.cli.test_evaluate_files import ROOT


class Interrupt(TrainerCallback):
    """Interrupts a run after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_prints_the_command_that_goes_on(tmp_path, pocket_root, appworld_venv, monkeypatch, capsys):
    argv = [
        *("train", "--config", str(ROOT / "recipes/quickstart/config.yaml"), "--output_dir", str(tmp_path / "a run")),
        *("--model_name_or_path", str(ROOT / "recipes/quickstart/model"), "--appworld_root", str(pocket_root)),
        *("--appworld_venv", str(appworld_venv), "--max_steps", "3", "--eval_strategy", "no", "--save_steps", "1"),
        *("--per_device_train_batch_size", "8", "--max_episodes", "8", "--max_train_tasks", "2"),
    ]
    init = GVPOTrainer.__init__

    def interrupted(self, *arguments, **options):
        init(self, *arguments, **options)
        self.add_callback(Interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(GVPOTrainer, "__init__", interrupted)
        assert main(argv) == 130
    line = next(line for line in capsys.readouterr().err.splitlines() if "to go on" in line)
    assert line.startswith("gvpo-trl: to go on from checkpoint-1: gvpo-trl train --config ")
    command = shlex.split(line.partition(": to go on from checkpoint-1: ")[2])
    assert main(command[1:]) == 0
    assert (tmp_path / "a run" / "checkpoint-3").is_dir()


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    assert "holds no checkpoint yet" in how_to_resume(["--config", "x.yaml"], str(tmp_path))
