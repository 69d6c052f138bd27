"""Environments that run an agent's code: their protocol (`base.py`) and a conformance test for them (`checks.py`).

Runs in the trainer's process. Imports the standard library, `failures` and `faults`. `rollout` talks to it.
"""
