"""AppWorld's own servers, and environments on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld.http import pool
from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments
from tests.environments.http.http_servers import HttpServers
from tests.environments.support import split_ids


@pytest.fixture(scope="module")
def servers(pocket_root: Path, appworld_venv: Path) -> Iterator[HttpServers]:
    """Two real servers."""
    with HttpServers(pocket_root, 2, appworld_venv) as servers:
        yield servers


@pytest.fixture(scope="module")
def remote(servers: HttpServers, pocket_root: Path) -> Iterator[RemoteEnvironments]:
    """An environment on both servers."""
    with RemoteEnvironments(servers.urls, root=pocket_root, step_timeout_s=4).start() as remote:
        yield remote


@pytest.fixture
def alone(servers: HttpServers) -> Iterator[RemoteEnvironments]:
    """An environment on one server, which does not know the tasks beforehand."""
    with RemoteEnvironments(servers.urls[:1]) as alone:
        yield alone


@pytest.fixture
def task(pocket_root: Path) -> str:
    return split_ids(pocket_root)[0]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that asks a dead server again at once."""
    monkeypatch.setattr(pool, "BACK_OFF_S", 0.01)
