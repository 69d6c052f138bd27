"""Episodes on AppWorld's own environment servers, which are started elsewhere and asked over HTTP.

Runs in the trainer's process. Imports the standard library, `environments.base`, `failures` and `faults`. Its
`RemoteEnvironments` stands behind `AppWorldEnvironments(urls=[…])`.
"""
