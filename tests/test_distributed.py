"""Training with two processes on one machine: groups span ranks, and all ranks report the same figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gvpo_trl.reporting.traces import read_traces

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests/support/ddp_run.py"), str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_a_group_spans_both_ranks(ranks):
    _, (zero, one) = ranks
    assert zero["processes"] == one["processes"] == 2
    for (tasks_zero, values_zero), (tasks_one, values_one) in zip(zero["train"], one["train"], strict=True):
        assert len({*tasks_zero, *tasks_one}) == 1
        # The rewards are 1 and 0.5 on rank 0, and 0 and 0.5 on rank 1; the mean is that of all four.
        assert values_zero == [pytest.approx([0.0, 0.5]), [0.0]]
        assert values_one == [pytest.approx([-0.6, -0.5]), pytest.approx([-0.2, 0.0])]


def test_ranks_agree(ranks):
    _, (zero, one) = ranks
    assert zero["weights"] == one["weights"]
    assert len(zero["log"]) == len(one["log"]) >= 3
    assert [entry["step"] for entry in zero["log"] if "reward" in entry] == [1, 2]
    for first, second in zip(zero["log"], one["log"], strict=True):
        timed = ("runtime", "per_second", "step_time", "preparation_time")
        for name in first:
            if not any(word in name for word in timed):
                assert first[name] == pytest.approx(second[name], nan_ok=True), name


def test_metrics_are_of_the_whole_batch(ranks):
    _, (zero, _) = ranks
    logged = zero["log"][0]
    assert logged["steps/failed"] == pytest.approx(3 / 7)
    assert logged["rollout/turns"] == pytest.approx(7 / 4)
    assert logged["rollout/task_goal_completion"] == pytest.approx(1 / 4)
    assert logged["groups/zero_variance"] == 0.0
    assert logged["reward"] == 0.5


def test_each_of_seven_tasks_counts_once(ranks):
    _, both = ranks
    for rank in both:
        assert rank["eval"]["eval_tgc"] == 57.1  # 4 of 7 tasks
        assert rank["eval"]["eval_sgc"] == 33.3  # 1 of 3 scenarios
        assert (rank["report"]["tasks"], rank["report"]["attempts"]) == (3, 3)


def test_each_task_of_a_stream_counts_once(ranks):
    _, both = ranks
    for rank in both:
        assert rank["streamed"]["eval_tgc"] == 57.1
        assert rank["streamed"]["eval_sgc"] == 33.3


def test_each_rank_writes_its_own_traces(ranks):
    folder, _ = ranks
    traces = list(read_traces(folder))
    assert {path.name for path in (folder / "_trajectories").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}
    assert sum(trace["mode"] == "train" for trace in traces) == 8
