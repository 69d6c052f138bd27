"""Episodes on AppWorld's own environment servers, which run elsewhere and are asked over HTTP.

It runs in the trainer's process. It imports the standard library, `environments.base`, `failures`, `faults`, `text`,
and of its parent folder `wire`, `limits` and `tasks`. Users call it through `AppWorldEnvironments(urls=[…])`, which
makes a `RemoteEnvironments`.
"""
