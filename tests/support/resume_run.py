"""Runs one of two training processes that resume: `torchrun … resume_run.py FOLDER` writes FOLDER/rankN.json."""

import json
import os
import sys
from pathlib import Path

from tests.support.interrupted import CASES, differences, train


def main() -> None:
    """Train without an interruption, then resume from each checkpoint, and write what differs on this rank."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    found = {}
    for case in ("buffer", "iterations"):
        options = CASES[case] | {"ddp_backend": "gloo", "max_steps": 5, "num_generations": 4}
        whole = train(folder / case, **options)
        for step in (1, 2, 3, 4):
            resumed = train(folder / case, folder / case / f"checkpoint-{step}", **options)
            found[f"{case} {step}"] = differences(whole, resumed)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
