"""`gvpo-trl view` shows a table of the run, filters it, and shows trajectories in full."""

import json
import subprocess
import sys

import pytest

from gvpo_trl.cli import main as cli
from gvpo_trl.reporting.viewer import view


def trace(task_id="a_1", mode="train", step=0, reward=0.5, failures=(None, "runtime"), **fields):
    turns = [
        {"text": f"code {n}", "code": "1", "observation": f"seen {n}", "failure": failure, "tokens": 3}
        for n, failure in enumerate(failures)
    ]
    scored = {"passed": ["kept"], "failed": ["done"]} if reward is not None else {"passed": None, "failed": None}
    return {
        "task_id": task_id, "mode": mode, "step": step, "reward": reward, "steps": turns, "stop": "completed",
        "fault": None, "messages": [{"role": "user", "content": "Do it."}], **scored, **fields,
    }  # fmt: skip


@pytest.fixture
def run_folder(tmp_path):
    traces = [
        trace(),
        trace(task_id="b_1", reward=1.0, failures=(None,), failed=[]),
        trace(step=4, reward=None, failures=(), fault="host: gone"),
        trace(mode="eval", step=4, failures=("syntax",) * 3),
    ]
    (tmp_path / "_trajectories").mkdir()
    (tmp_path / "_trajectories" / "rank0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in traces))
    return tmp_path


def test_a_line_per_mode_and_step(run_folder):
    rows = [line.split() for line in view(run_folder, last=0)]
    assert rows == [
        ["mode", "step", "trajs", "reward", "solved", "failed", "steps", "turns"],
        ["eval", "4", "1", "0.500", "0/1", "1.00", "3.0"],
        ["train", "0", "2", "0.750", "1/2", "0.33", "1.5"],
        ["train", "4", "1", "-", "0/0", "-", "0.0"],
    ]


def test_a_trajectory_in_full(run_folder):
    text = "\n".join(view(run_folder, task_id="a_1", step=0))
    for part in (
        "Do it.",
        "code 1",
        "FAILED: runtime",
        "executed",
        "seen 1",
        "pass  kept",
        "FAIL  done",
        "reward 0.500",
    ):
        assert part in text
    assert "host: gone" in "\n".join(view(run_folder, step=4, mode="train"))


def test_filters(run_folder):
    assert "b_1" not in "\n".join(view(run_folder, failed=True, last=9))
    with pytest.raises(ValueError, match="no trajectory that matches"):
        list(view(run_folder, task_id="z_1"))


def test_a_folder_without_trajectories_is_a_users_mistake(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "holds no trajectories" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(run_folder):
    command = f"{sys.executable} -m gvpo_trl view {run_folder} --last 9 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
