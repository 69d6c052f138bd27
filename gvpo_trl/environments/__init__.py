"""Environments that run an agent's code: what the rollout asks of one (`base.py`), and a test of yours (`checks.py`).

Runs in the trainer's process. Imports the standard library, `failures` and `faults`. `rollout` talks to it.
"""
