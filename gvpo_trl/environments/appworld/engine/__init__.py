"""What runs in AppWorld's own virtual environment, in processes that the trainer's side starts through `boot.py`.

This package and its libraries are not installed there, so modules import the standard library, AppWorld and its
dependencies, `wire` and `sandbox`. `worlds/` holds worlds and evaluates them, `agents/` runs the agents' code; other
modules serve both.
"""
