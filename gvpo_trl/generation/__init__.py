"""What samples the turns of a rollout: transformers with a kept key-value cache, or vLLM.

Runs in the trainer's process. Imports torch, transformers, accelerate and `rollout`'s types; vLLM only inside the
functions that use it. `trainer.py` opens a session of it for each rollout.
"""
