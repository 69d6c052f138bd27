"""Episodes on AppWorld's own environment servers, which run elsewhere and are asked over HTTP.

Runs in the trainer's process. Imports the standard library, `environments.base`, `failures` and `faults`. Users call
it through `AppWorldEnvironments(urls=[…])`, which makes a `RemoteEnvironments`.
"""
