"""Environments that run an agent's code: their protocol (`base.py`) and a conformance test for them (`checks.py`).

It runs in the trainer's process and imports the standard library, `failures` and `faults`. `rollout` calls it.
"""
