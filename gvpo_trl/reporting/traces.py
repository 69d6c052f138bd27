"""Writes trajectories to disk and reads them, one JSON line each; they can be read during a run and after a kill.

`output_dir/_trajectories/rank0.jsonl` holds lines like `{"schema": 1, "mode": "train", "step": 3, "task_id": …, …}`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gvpo_trl.rollout.types import Trajectory

SCHEMA = 1
FOLDER = "_trajectories"
"""Folder of the traces in `output_dir`. Its name begins with an underscore because the Trainer pushes everything else
in `output_dir` to the Hub, and the texts of AppWorld's tasks must not be republished."""


class TraceWriter:
    """Appends trajectories to one file per rank; the lines of one rollout are flushed together.

    Args:
        folder: folder of the file, created at the first write.
        rank: process index, which is part of the file's name.
    """

    def __init__(self, folder: Path, rank: int = 0):
        self.path = folder / f"rank{rank}.jsonl"

    def write(self, trajectories: Sequence[Trajectory], *, step: int, mode: str) -> None:
        """Append the trajectories of one rollout.

        Raises:
            OSError: the disk is full; what was written before stays readable.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"schema": SCHEMA, "mode": mode, "step": step, **to_json(t)}) for t in trajectories]
        with self.path.open("a+b") as file:
            if file.tell() and not _ends_with_newline(file):
                file.write(b"\n")  # a run that was killed during a write left an incomplete line
            file.write("".join(line + "\n" for line in lines).encode())


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return what a reader needs of a trajectory: texts, verdicts, scores and times, but no token ids."""
    score = trajectory.score
    return {
        "task_id": trajectory.task_id,
        "messages": trajectory.messages,
        "steps": [
            {
                "text": step.text,
                "code": step.code,
                "observation": step.observation,
                "failure": step.failure,
                "api_calls": list(step.api_calls),
                "api_errors": list(step.api_errors),
                "tokens": len(step.action_ids),
                "generate_s": round(step.generate_s, 4),
                "execute_s": round(step.execute_s, 4),
            }
            for step in trajectory.steps
        ],
        "stop": trajectory.stop,
        "reward": trajectory.reward,
        "passed": None if score is None else list(score.passed),
        "failed": None if score is None else list(score.failed),
        "prompt_tokens": len(trajectory.prompt_ids),
        "reset_s": round(trajectory.reset_s, 4),
        "score_s": round(trajectory.score_s, 4),
        "retries": trajectory.retries,
        "fault": trajectory.fault,
    }


def read_traces(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the trajectories of a run, those of rank 0 first. Lines that are not JSON objects are skipped.

    Args:
        run: the `output_dir` of a training run, its `_trajectories` folder, or one of the files.

    Raises:
        FileNotFoundError: the run has no traces.
    """
    run = Path(run)
    files = [run] if run.is_file() else sorted((*run.glob("*.jsonl"), *(run / FOLDER).glob("*.jsonl")))
    if not files:
        raise FileNotFoundError(
            f"{run} holds no trajectories; give the output_dir of a run with log_trajectories on (the default)."
        )
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    trace = json.loads(line)
                except (ValueError, RecursionError):  # the line is not JSON, not even text, or nested without end
                    continue
                if isinstance(trace, dict):
                    yield trace
