"""What many tests share: AppWorld's environment, the pocket data and an environment on it."""

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import gvpo_trl
from gvpo_trl.environments.appworld.setup import default_venv, ensure_appworld, make_pocket


@pytest.fixture(scope="session")
def appworld_venv() -> Path:
    """AppWorld's own virtual environment, made when it is missing."""
    return ensure_appworld(default_venv())


@pytest.fixture(scope="session")
def pocket_root(appworld_venv: Path) -> Path:
    """The default pocket data, made once per version of its generator."""
    sources = sorted((Path(gvpo_trl.__file__).parent / "pocket").rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    root = Path(tempfile.gettempdir()) / f"gvpo-test-pocket-{digest}"
    return make_pocket(root, venv=appworld_venv)


@pytest.fixture(scope="session")
def environments(pocket_root: Path, appworld_venv: Path) -> Iterator:
    """Episodes on the pocket data with a short deadline, shared by the whole run: close what you open."""
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    with AppWorldEnvironments(pocket_root, venv=appworld_venv, max_episodes=8, step_timeout_s=4) as environments:
        yield environments
