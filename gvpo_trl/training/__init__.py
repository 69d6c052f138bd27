"""What the trainer does around TRL's: checks of its inputs, metrics, and rows that a training step may leave out.

Runs in the trainer's process. Imports torch, transformers and `rollout`'s types, never TRL. `trainer.py` calls it.
"""
