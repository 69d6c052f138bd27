"""Functions that the trainer calls before and after TRL's: checks of inputs, metrics, and the skipping of idle rows.

This package runs in the trainer's process. It imports torch, transformers, accelerate, `objective`, `failures`
and modules of `rollout`, never TRL. `trainer.py` calls it.
"""
