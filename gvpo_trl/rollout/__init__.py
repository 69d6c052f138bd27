"""The rollout makes trajectories, and TRL's rows, of prompts. `loop.py` is the main path; read it first.

It runs in the trainer's process, as the callback that TRL calls. It imports only the standard library, `failures`,
`faults` and `environments.base`; the tokenizer, the model and the trainer are passed to it.
"""
