"""Traces stay readable during a run, after a kill in the middle of a line, and when the run goes on after it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gvpo_trl.environments.base import Score
from gvpo_trl.failures import FailureKind
from gvpo_trl.reporting.traces import SCHEMA, TraceWriter, read_traces
from gvpo_trl.rollout.types import Step, StopReason, Trajectory


def trajectory(task_id="t_1", text="print('ä')"):
    return Trajectory(
        task_id=task_id,
        messages=[{"role": "user", "content": "Do it."}],
        prompt_ids=[1, 2, 3],
        steps=[
            Step(
                action_ids=[4, 5],
                action_logprobs=None,
                bridge_ids=[6],
                text=text,
                code=text,
                observation="Output: 🎵 \ud83d",  # half a surrogate pair, as an agent may print it
                failure=FailureKind.API,
                api_calls=("spotify.login",),
                api_errors=("spotify.login",),
                generate_s=0.12345,
            )
        ],
        stop=StopReason.MAX_TURNS,
        score=Score(passed=("a",), failed=("b",)),
    )


def test_what_is_written_is_what_is_read(tmp_path):
    TraceWriter(tmp_path / "_trajectories").write([trajectory()], step=3, mode="train")
    (trace,) = read_traces(tmp_path)
    assert trace == {
        "schema": SCHEMA,
        "mode": "train",
        "step": 3,
        "task_id": "t_1",
        "messages": [{"role": "user", "content": "Do it."}],
        "steps": [
            {
                "text": "print('ä')",
                "code": "print('ä')",
                "observation": "Output: 🎵 \ud83d",
                "failure": "api",
                "api_calls": ["spotify.login"],
                "api_errors": ["spotify.login"],
                "tokens": 2,
                "generate_s": 0.1235,
                "execute_s": 0.0,
            }
        ],
        "stop": "max_turns",
        "reward": 0.5,
        "passed": ["a"],
        "failed": ["b"],
        "prompt_tokens": 3,
        "reset_s": 0.0,
        "score_s": 0.0,
        "retries": 0,
        "fault": None,
    }


def test_an_unscorable_trajectory(tmp_path):
    lost = Trajectory(
        task_id="t_1",
        messages=[],
        prompt_ids=[],
        steps=[],
        stop=StopReason.ENVIRONMENT_LOST,
        score=None,
        retries=1,
        fault="host: gone",
    )
    TraceWriter(tmp_path).write([lost], step=0, mode="eval")
    (trace,) = read_traces(tmp_path)
    assert (trace["reward"], trace["passed"], trace["failed"], trace["fault"]) == (None, None, None, "host: gone")


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_half_a_line_is_skipped_and_ended(tmp_path, cut):
    writer = TraceWriter(tmp_path)
    writer.write([trajectory("a_1"), trajectory("a_2")], step=0, mode="train")
    writer.path.write_bytes(writer.path.read_bytes()[:-cut])
    assert [trace["task_id"] for trace in read_traces(tmp_path)] == (["a_1", "a_2"] if cut == 1 else ["a_1"])
    TraceWriter(tmp_path).write([trajectory("a_3")], step=1, mode="train")
    expected = ["a_1", "a_2", "a_3"] if cut == 1 else ["a_1", "a_3"]
    assert [trace["task_id"] for trace in read_traces(tmp_path)] == expected


def test_a_writer_that_is_killed(tmp_path):
    """After a SIGKILL at any moment, every line but the last is whole."""
    program = (
        "import sys; from pathlib import Path\n"
        "from gvpo_trl.reporting.traces import TraceWriter\n"
        "from tests.reporting.test_traces import trajectory\n"
        "writer = TraceWriter(Path(sys.argv[1]))\n"
        "for step in range(10**6):\n"
        "    writer.write([trajectory(text='x' * 20000)] * 3, step=step, mode='train')\n"
        "    if step == 20: print('started', flush=True)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGKILL)
    before = list(read_traces(tmp_path))
    assert len(before) >= 60
    assert [trace["step"] for trace in before] == [number // 3 for number in range(len(before))]
    TraceWriter(tmp_path).write([trajectory("after_1")], step=0, mode="train")
    assert [trace["task_id"] for trace in read_traces(tmp_path)] == ["t_1"] * len(before) + ["after_1"]


def test_the_ways_to_name_a_run(tmp_path):
    folder = tmp_path / "_trajectories"
    TraceWriter(folder, rank=1).write([trajectory("b_1")], step=0, mode="train")
    TraceWriter(folder, rank=0).write([trajectory("a_1")], step=0, mode="train")
    for path in (tmp_path, str(tmp_path), folder):
        assert [trace["task_id"] for trace in read_traces(path)] == ["a_1", "b_1"]
    assert [trace["task_id"] for trace in read_traces(folder / "rank1.jsonl")] == ["b_1"]


def test_no_traces(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no trajectories; give the output_dir"):
        next(read_traces(tmp_path))


def test_a_line_of_something_else_is_skipped(tmp_path):
    file = tmp_path / "rank0.jsonl"
    file.write_bytes(b'\xff\xfe\n\n{"task_id": "a_1"}\n' + b"\0" * 8 + b"\n")
    assert list(read_traces(tmp_path)) == [{"task_id": "a_1"}]


def test_lines_are_plain_json(tmp_path):
    TraceWriter(tmp_path).write([trajectory()], step=0, mode="train")
    (line,) = (tmp_path / "rank0.jsonl").read_text(encoding="ascii").splitlines()
    assert json.loads(line)["task_id"] == "t_1"
