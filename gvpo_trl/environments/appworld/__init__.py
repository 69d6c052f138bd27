"""The AppWorld environment: episodes in processes of their own, and AppWorld's tasks as a dataset.

The modules beside this file run in the trainer's process. They import the standard library, `environments.base`,
`failures`, `faults` and `text`; the rollout calls them. They start the programs of `engine` and `pocket` and talk to
them over `wire`. Only those programs import AppWorld, because an open world freezes the clock of its process. The
public names are imported on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gvpo_trl.environments.appworld.client import AppWorldEnvironments
    from gvpo_trl.environments.appworld.tasks import load_tasks

__all__ = ["AppWorldEnvironments", "load_tasks"]


def __getattr__(name: str) -> object:
    if name == "AppWorldEnvironments":
        from gvpo_trl.environments.appworld.client import AppWorldEnvironments

        return AppWorldEnvironments
    if name == "load_tasks":
        from gvpo_trl.environments.appworld.tasks import load_tasks

        return load_tasks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
