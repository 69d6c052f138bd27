"""What is left of a run for people to read: trajectories on disk, the viewer, figures, the model card.

Runs in the trainer's process, or offline on the files of a run. Imports `rollout`'s types, and plotting libraries only
inside the functions that use them. `trainer.py` and the commands call it.
"""
