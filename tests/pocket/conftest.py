"""The experiment under which a test file of this folder leaves AppWorld's outputs."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def experiment(request: pytest.FixtureRequest, pocket_root: Path) -> Iterator[str]:
    """A name of this test file and process; what was written under it is removed at the end."""
    name = f"{request.module.__name__.rpartition('.')[2]}_{os.getpid()}"
    yield name
    for folder in (pocket_root / "experiments" / "outputs").glob(f"{name}*"):
        shutil.rmtree(folder)
