"""The rollout: prompts in, trajectories and TRL's rows out. `loop.py` is the main path; read it first.

Runs in the trainer's process, as the callback that TRL calls. Imports the standard library, `failures`, `faults` and
`environments.base`, nothing else: what it needs of a tokenizer, a model or a trainer is handed to it.
"""
