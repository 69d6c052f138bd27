"""`gvpo-trl appworld check`: imports AppWorld in its environment and tries a data root."""

import dataclasses
from pathlib import Path

from gvpo_trl.environments.appworld.client import AppWorldEnvironments
from gvpo_trl.environments.appworld.setup import AppWorldFacts, check_installation
from gvpo_trl.environments.appworld.tasks import task_folders
from gvpo_trl.faults import EnvironmentFault, SetupError


def check_appworld(venv: Path | str | None = None, root: Path | str | None = None) -> AppWorldFacts:
    """Import AppWorld in its environment. With a data root, also open a world, run code in it and evaluate it.

    Raises:
        SetupError: something is missing or does not work.
    """
    facts = check_installation(venv)
    if root is None:
        return facts
    try:
        with AppWorldEnvironments(root, venv=facts.venv, max_episodes=1) as environments:
            task = task_folders(environments.root)[0].name
            with environments.open(task) as episode:
                step = episode.step("print(len(apis.api_docs.show_app_descriptions()))")
                if step.failure is not None:
                    raise SetupError(f"{environments.root}: task {task} cannot call an app: {step.text}")
                score = episode.score()
    except EnvironmentFault as error:
        raise SetupError(f"{root}: {error}") from error
    return dataclasses.replace(facts, root=environments.root, passed=len(score.passed), failed=len(score.failed))
