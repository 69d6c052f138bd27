"""What travels between processes: messages on sockets (`frames.py`) and Python values in them (`values.py`).

Runs on every side of those sockets: the trainer's process, AppWorld's environment, the restricted interpreter. Imports
the standard library alone.
"""
