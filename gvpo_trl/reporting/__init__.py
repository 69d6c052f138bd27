"""Writes and shows what people read of a run: trajectories, the viewer, figures, the model card.

This folder runs in the trainer's process, or offline on the files of a run. It imports `rollout`,
`faults`, `text` and the facts about tasks in `environments`, and plotting libraries only inside the functions that use
them. `trainer.py` and the commands call it.
"""
