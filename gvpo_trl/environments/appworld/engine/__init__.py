"""What runs in AppWorld's own virtual environment, in processes that the trainer's side starts through `boot.py`.

This package is not installed there and neither are its libraries: imports are the standard library, AppWorld and what
it brings, `wire` and `sandbox`. `worlds/` holds worlds and evaluates them, `agents/` runs the agents' code; other
modules serve both.
"""
