"""The command line: `gvpo-trl train`, `evaluate`, `view`, `doctor` and `appworld`.

It runs in the user's Python, in the process that becomes the trainer's. It may import the whole package; each command
imports only what it needs, at the moment when it needs it. No other folder imports this one.
"""
