"""The figure of a run: `gvpo-trl view RUN --figure FILE`, drawn from the Trainer's own log."""

import json
import sys

import pytest

from gvpo_trl.cli import main as cli
from gvpo_trl.reporting.plots import plot_run, read_history, series

HISTORY = [
    {"step": 1, "reward": 0.25, "steps/failed": 0.5, "entropy": 1.0},
    {"step": 2, "eval_tgc": 50.0},
    {"step": 2, "reward": None, "steps/failed": 0.4, "entropy": float("nan")},
    {"step": 3, "reward": 0.75, "steps/failed": 0.3, "entropy": 0.5},
    {"train_runtime": 9.0},
]


def checkpoint(run, step, history):
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))


@pytest.fixture
def run_folder(tmp_path):
    checkpoint(tmp_path, 2, HISTORY[:2])
    checkpoint(tmp_path, 10, HISTORY)
    return tmp_path


def test_the_log_of_the_latest_checkpoint_is_read(run_folder):
    assert series(read_history(run_folder), "reward") == ([1, 2, 3], [0.25, None, 0.75])
    assert series(read_history(run_folder / "checkpoint-2"), "reward") == ([1], [0.25])


def test_the_command_draws_a_picture(run_folder, capsys):
    path = run_folder / "figures" / "run.png"
    assert cli.main(["view", str(run_folder), "--figure", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"figure in {path}\n"


def test_points_outside_the_training_change_the_picture(run_folder):
    without = plot_run(HISTORY, run_folder / "a.png").read_bytes()
    assert plot_run(HISTORY, run_folder / "b.png").read_bytes() == without
    assert plot_run(HISTORY, run_folder / "c.png", held_out=[(0, 40.0), (3, 60.0)]).read_bytes() != without


def test_a_run_without_a_checkpoint_is_a_users_mistake(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path), "--figure", str(tmp_path / "run.png")]) == 2
    assert f"{tmp_path} holds no trainer_state.json" in capsys.readouterr().err


def test_a_path_without_a_suffix_gets_one(run_folder):
    path = plot_run(HISTORY, run_folder / "run")
    assert path == run_folder / "run.png" and path.is_file()


@pytest.mark.parametrize(("file", "message"), [("run.nonsense", "nonsense"), ("folder.png", "folder.png")])
def test_a_file_that_cannot_be_written_is_a_users_mistake(run_folder, capsys, file, message):
    (run_folder / "folder.png").mkdir()
    assert cli.main(["view", str(run_folder), "--figure", str(run_folder / file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "nothing"])
def test_a_log_that_is_not_the_trainers_is_a_users_mistake(run_folder, capsys, text):
    (run_folder / "trainer_state.json").write_text(text)
    assert cli.main(["view", str(run_folder), "--figure", str(run_folder / "run.png")]) == 2
    assert "error: " in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(run_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["view", str(run_folder), "--figure", str(run_folder / "run.png")]) == 2
    assert 'pip install "gvpo-trl[plots]"' in capsys.readouterr().err
