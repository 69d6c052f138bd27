"""Environments leave nothing behind when they are closed or when their trainer ends."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.workspace import PREFIX, Workspace
from gvpo_trl.faults import HostFault
from tests.environments.support import children_of, every_pid, processes_below, split_ids, stat_of, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.fixture(scope="module")
def plain(pocket_root, appworld_venv):
    """Episodes whose agent code runs in the world's process."""
    options = {"rehearse": False, "venv": appworld_venv, "max_episodes": 4, "step_timeout_s": 30}
    with AppWorldEnvironments(pocket_root, isolation="process", **options) as environments:
        yield environments


def test_grandchildren_go_with_their_episode(plain, task):
    code = """
os = __import__('posix')
def grandchild(leave):
    if os.fork() == 0:
        if leave:
            os.setsid()
        while True:
            pass
grandchild(False)
grandchild(True)
print(os.getpid())
"""
    with plain.open(task) as episode:
        result = episode.step(code)
        assert result.failure is None, result.text
        session = int(result.text)
        assert any(stat_of(pid)[2] == session for pid in every_pid())
    children_of(plain)
    host = plain.machinery.worlds.host.process.pid
    assert wait_until(lambda: not any(stat_of(pid)[1] == host or stat_of(pid)[2] == session for pid in every_pid()))


TRAINER = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born with it ignored
from gvpo_trl.environments.appworld import AppWorldEnvironments

environments = AppWorldEnvironments({root!r}, rehearse=False, venv={venv!r}, output_dir={out!r}, step_timeout_s=60)
other = environments.open({task!r})
other.step("print(1)")
episode = environments.open({task!r})
threading.Thread(target=lambda: episode.step("while True: pass"), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("signum", "then"),
    [
        (signal.SIGKILL, "time.sleep(600)"),
        (signal.SIGINT, "time.sleep(600)"),
        (None, "sys.exit(0)"),
        (None, "raise ValueError"),
    ],
)
def test_a_trainer_that_ends_leaves_nothing(pocket_root, appworld_venv, task, tmp_path, signum, then):
    values = {"root": str(pocket_root), "venv": str(appworld_venv), "out": str(tmp_path), "task": task, "then": then}
    script = textwrap.dedent(TRAINER).format(**values)
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert trainer.stdout.readline() == "ready\n"
        if signum is not None:
            assert len(processes_below(str(tmp_path))) == 7, "trainer, two hosts, two worlds, two interpreters"
            trainer.send_signal(signum)
        trainer.wait(timeout=60)
    finally:
        trainer.kill()
        trainer.communicate()
    assert wait_until(lambda: not processes_below(str(tmp_path))), processes_below(str(tmp_path))
    if signum is signal.SIGKILL:
        assert list(tmp_path.iterdir()), "nobody was there to tidy up"
        Workspace(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_only_workspaces_without_an_owner_are_cleaned(tmp_path):
    alive = Workspace(tmp_path)
    stale = tmp_path / f"{PREFIX}stale"
    stale.mkdir()
    (stale / "owner").touch()
    unrelated = tmp_path / f"{PREFIX}unrelated"
    unrelated.mkdir()
    second = Workspace(tmp_path)
    assert alive.path.exists() and second.path.exists() and unrelated.exists() and not stale.exists()
    alive.remove()
    alive.remove()
    second.remove()


def test_close_is_idempotent_and_wakes_those_who_wait(pocket_root, appworld_venv, task):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_episodes=1)
    episode = environments.open(task)
    caught = []

    def wait():
        try:
            environments.open(task)
        except HostFault as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    workspace = environments.machinery.workspace.path
    environments.close()
    environments.close()
    waiter.join(30)
    assert len(caught) == 1
    with pytest.raises(HostFault):
        environments.open(task)
    with pytest.raises(HostFault):
        episode.step("print(1)")
    episode.close()
    assert not workspace.exists() and not processes_below(str(workspace))
