"""`gvpo-trl view` shows a table of the run, filters it, and shows trajectories in full."""

import json
import os
import subprocess
import sys

import pytest

from gvpo_trl.cli import main as cli
from gvpo_trl.reporting.viewer import render, view
from tests.support.operations import count
from tests.test_text import ESCAPES, is_shown


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


def hostile(text):
    """A trace that holds a text wherever a text of an agent, a model, an environment or a data set can be."""
    each = trace(
        task_id=text, stop=text, fault=text, passed=[text], failed=[text], failures=(text, None),
        messages=[{"role": text, "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]}],
    )  # fmt: skip
    for turn in each["steps"]:
        turn |= {"text": text, "observation": text}
    return each


def write(folder, lines):
    (folder / "rank0.jsonl").write_bytes(b"".join(line.encode() + b"\n" for line in lines))


@pytest.mark.parametrize(("text", "shown"), ESCAPES.values(), ids=ESCAPES)
def test_no_text_of_a_trace_reaches_the_terminal_as_it_is(tmp_path, capsys, text, shown):
    write(tmp_path, [json.dumps(hostile(text))])
    assert cli.main(["view", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert is_shown(out)
    assert out.count(shown) >= 11


def test_a_terminal_without_unicode_shows_every_trajectory(tmp_path):
    write(tmp_path, [json.dumps(hostile("日本 \ud83d"))])
    done = subprocess.run(
        [sys.executable, "-m", "gvpo_trl", "view", str(tmp_path)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u65e5\u672c \ud83d" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "null", "3", "[]", '"text"', "{}", "{", "[" * 100_000, '{"task_id": "a_1", "mode": "train", "step": 0}',
        json.dumps(trace(step="0")), json.dumps(trace(reward="1")), json.dumps(trace(steps=[{}])),
        json.dumps(trace(steps=3)), json.dumps(trace(messages=["Do it."])), json.dumps(trace(passed=3)),
        json.dumps(trace())[:-40],
    ],
)  # fmt: skip
def test_a_line_that_is_no_trace_does_not_end_the_viewer(tmp_path, line):
    write(tmp_path, [json.dumps(trace()), line, json.dumps(trace(task_id="b_1"))])
    lines = list(view(tmp_path, last=9))
    assert lines[1].split()[:3] == ["train", "0", "2"]
    assert sum(line.startswith(("a_1 ", "b_1 ")) for line in lines) == 2


def test_a_word_longer_than_the_screen_is_not_cut():
    word = "a" * 1000
    lines = list(render(trace(failed=[f"the title is {word}"])))
    assert lines[-1] == f"FAIL  the title is\n      {word}"


@pytest.mark.parametrize("unit", ["a", " ", "\t", "\n", "-", "a-", "!--", "\x1b", "\u202e", "\\", "`", "word "])
def test_twice_the_text_takes_at_most_twice_the_operations(unit):
    once, twice = (count(list, render(hostile(unit * length))) for length in (3000, 6000))
    assert twice <= 2 * once + 100
