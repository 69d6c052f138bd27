"""Runs one of two training processes: `torchrun … ddp_run.py FOLDER` writes its results to FOLDER/rankN.json."""

import json
import sys
from pathlib import Path

from gvpo_trl.evaluation import evaluate
from tests.support.training import FAIL, ScriptedTrainer, finish, make_trainer, tasks

SCRIPT = {
    (0, 0): [FAIL, finish(1, 0)],
    (0, 1): [finish(1, 1)],
    (1, 0): [FAIL, finish(0, 1)],
    (1, 1): [FAIL, finish(1, 1)],
}
"""Turns by (rank, row). A group of four spans both ranks; rank 0 holds its first two rows."""


class Recorder(ScriptedTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        values = [
            sorted(set(row[mask.bool()].tolist()))
            for row, mask in zip(batch["advantages"], batch["completion_mask"] * batch["tool_mask"], strict=True)
        ]
        self.__dict__.setdefault("seen", []).append([[row["task_id"] for row in inputs], values])
        return batch


def main(folder: Path) -> None:
    trainer = make_trainer(
        folder,
        trainer_class=Recorder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_generations_eval=1,
        eval_dataset=tasks(7),
        max_steps=2,
        learning_rate=1e-2,
        ddp_backend="gloo",
    )
    rank = trainer.accelerator.process_index
    trainer.script = lambda number, row: SCRIPT[rank, number]
    trainer.train()
    train = list(trainer.seen)
    weights = sum(p.double().abs().sum().item() for p in trainer.model.parameters())

    # The sampler fills the last batch up with tasks that have come before.
    trainer.script = lambda number, row: [finish(1, 0) if row["task_id"] in SOLVED else finish(0, 1)]
    metrics = trainer.evaluate()
    streamed = trainer.evaluate(tasks(7).to_iterable_dataset())
    trainer.script = None
    report = evaluate(trainer, tasks(3), samples=1)
    result = {
        "processes": trainer.accelerator.num_processes,
        "train": train,
        "log": trainer.state.log_history,
        "weights": weights,
        "eval": metrics,
        "streamed": streamed,
        "report": report,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


SOLVED = ("t0_1", "t0_2", "t0_3", "t1_1")
"""Tasks that are solved: all of scenario t0 and one of t1."""

if __name__ == "__main__":
    main(Path(sys.argv[1]))
