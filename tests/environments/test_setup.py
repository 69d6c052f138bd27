"""Tests of AppWorld's own environment: finding it, checking it, making it, and the errors when it is missing."""

import os
import shutil
import subprocess
import sys

import pytest

from gvpo_trl.environments.appworld import setup
from gvpo_trl.environments.appworld.check import check_appworld
from gvpo_trl.environments.appworld.setup import (
    VERSION,
    appworld_python,
    default_venv,
    ensure_appworld,
    make_pocket,
)
from gvpo_trl.faults import SetupError


@pytest.fixture
def imitation(appworld_venv, tmp_path):
    """A folder with the files that make it look like a finished environment."""
    venv = tmp_path / "venv"
    packages = venv / "lib" / "python3.11" / "site-packages"
    (packages / f"appworld-{VERSION}.dist-info").mkdir(parents=True)
    (packages / "appworld" / "apps" / "supervisor").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    return venv


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("GVPO_APPWORLD_VENV", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_venv() == tmp_path / "gvpo_trl" / f"appworld-{VERSION}"
    monkeypatch.setenv("GVPO_APPWORLD_VENV", str(tmp_path / "own"))
    assert default_venv() == tmp_path / "own"


def test_the_real_one_is_checked(appworld_venv):
    facts = check_appworld(appworld_venv)
    assert facts.appworld == VERSION and facts.venv == appworld_venv
    assert VERSION in str(facts) and str(appworld_venv) in str(facts)


def test_a_check_of_a_data_root_opens_a_world(appworld_venv, pocket_root):
    facts = check_appworld(appworld_venv, root=pocket_root)
    assert facts.root == pocket_root and facts.failed > 0 and "a world opens" in str(facts)
    with pytest.raises(SetupError, match="no AppWorld data"):
        check_appworld(appworld_venv, root="/nowhere")


def test_what_is_there_is_left_alone(appworld_venv, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("nothing had to be run"))
    assert ensure_appworld(appworld_venv) == appworld_venv


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda venv: shutil.rmtree(venv), "is missing"),
        (lambda venv: (venv / "bin" / "python").unlink(), "bin/python cannot be run"),
        (lambda venv: shutil.rmtree(venv / "lib"), "appworld is not installed"),
        (lambda venv: shutil.rmtree(next(venv.glob("lib/*/*/appworld/apps"))), "not unpacked"),
        (
            lambda venv: next(venv.glob("lib/*/*/*.dist-info")).rename(
                venv / "lib" / "python3.11" / "site-packages" / "appworld-0.1.4.dist-info"
            ),
            f"holds appworld 0.1.4, supported is {VERSION}",
        ),
    ],
)
def test_a_broken_one_is_told_with_its_remedy(imitation, damage, message):
    assert appworld_python(imitation) == imitation / "bin" / "python"
    damage(imitation)
    with pytest.raises(SetupError, match=message) as raised:
        appworld_python(imitation)
    assert "gvpo-trl appworld setup" in str(raised.value) and "\n" not in str(raised.value)


def test_an_environment_that_cannot_import_is_told(imitation):
    with pytest.raises(SetupError, match=r"AppWorld cannot be imported.*No module named"):
        check_appworld(imitation)


def test_a_folder_that_is_something_else_is_not_touched(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(SetupError, match="is not empty and no virtual environment"):
        ensure_appworld(tmp_path)
    assert (tmp_path / "precious").exists()


def test_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SetupError, match="the package index cannot be reached") as raised:
        ensure_appworld(tmp_path / "venv")
    assert "\n" not in str(raised.value)


def test_a_python_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "python3.12" else None)
    assert setup.fitting_python() == "/usr/bin/python3.12"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"Python 3\.14 cannot hold AppWorld, which needs 3\.11 to 3\.13"):
        setup.fitting_python()


def test_the_generators_own_error_is_handed_on(appworld_venv, tmp_path):
    with pytest.raises(SetupError, match="memory"):
        make_pocket(tmp_path / "memory", venv=appworld_venv)
