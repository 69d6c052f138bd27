"""Rollouts whose agents misbehave and whose machinery breaks; `python -m benchmarks.faults` runs them."""
