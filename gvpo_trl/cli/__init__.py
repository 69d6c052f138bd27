"""The command line: `gvpo-trl train`, `evaluate`, `view`, `doctor` and `appworld`.

Runs in the user's Python, which becomes the trainer's process. May import everything of the package, each command only
what it needs, when it needs it. Nothing imports it.
"""
