"""What travels between processes: messages on sockets (`frames`), Python values in them (`values`), texts (`texts`).

Runs on every side of those sockets: the trainer's process, AppWorld's environment, the restricted interpreter. Imports
the standard library alone.
"""
