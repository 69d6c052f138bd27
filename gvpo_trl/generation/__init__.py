"""Generators, which sample the turns of a rollout: transformers with a key-value cache kept between turns, or vLLM.

This package runs in the trainer's process. It imports torch, transformers, accelerate, `faults` and modules of
`rollout`, and vLLM only inside the functions that use it. `trainer.py` opens a session for each rollout.
"""
