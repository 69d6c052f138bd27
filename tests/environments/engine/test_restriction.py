"""An interpreter runs no agent code unless its test of itself finds that it is restricted."""

from pathlib import Path

import pytest

from gvpo_trl import sandbox
from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.environments.appworld.hosts import Launch
from gvpo_trl.faults import EpisodeFault
from tests.environments.support import split_ids


class Unrestricted(Launch):
    """Starts a host whose interpreters do not restrict themselves."""

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-I", str(Path(__file__).with_name("unrestricted.py")), self.module, *arguments]


@pytest.mark.skipif(sandbox.probe().level != "full", reason="; ".join(sandbox.probe().missing))
def test_an_interpreter_that_is_not_restricted_runs_no_agent_code(pocket_root, appworld_venv):
    with AppWorldEnvironments(pocket_root, venv=appworld_venv, rehearse=False) as environments:
        launch = environments.machinery.agents.launch
        config = launch.config | {"boot": boot.__file__}
        environments.machinery.agents.launch = Unrestricted(**vars(launch) | {"config": config})
        with pytest.raises(EpisodeFault, match="not restricted as it should be") as caught:
            environments.open(split_ids(pocket_root)[0])
    for finding in ("evaluation.py: worked", "open a Unix socket: worked", "fork: worked"):
        assert finding in str(caught.value)
