"""The host of worlds: it forks one process for each episode's world, and processes that evaluate what worlds saved.

It runs in AppWorld's environment (see `engine`). The trainer's side asks it for processes and talks to each; a
restricted interpreter sends a world its API calls. Only the processes that evaluate read ground truth.
"""
