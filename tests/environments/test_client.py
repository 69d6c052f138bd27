"""Tests of what `AppWorldEnvironments` refuses, and of a host that outlives the thread which started it."""

import os
import threading
import time

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import SetupError
from tests.environments.support import split_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_episodes": 0}, "max_episodes=0 must be"),
        ({"step_timeout_s": 0.5}, "step_timeout_s=0.5 must be"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s=nan must be"),
        ({"max_interactions": None}, "max_interactions=None must be"),
        ({"venv": "/nowhere"}, "gvpo-trl appworld setup"),
        ({"isolation": "docker"}, "isolation='docker' must be one of 'split', 'process'"),
        ({"isolation": "process", "require_sandbox": True}, "require_sandbox=True needs isolation='split'"),
        ({"urls": ["http://127.0.0.1:9"]}, "venv: of no effect on the servers of urls"),
        ({"output_dir": "/proc/nowhere"}, "output_dir='/proc/nowhere' cannot be written"),
        ({"output_dir": "/tmp/memory"}, "'memory'"),
        ({"root": "/nowhere"}, "gvpo-trl appworld pocket --root DIR"),
    ],
)
def test_mistakes_are_told_before_anything_starts(pocket_root, appworld_venv, values, message):
    with pytest.raises(SetupError, match=message) as raised:
        AppWorldEnvironments(**({"root": pocket_root, "venv": appworld_venv} | values))
    assert len(str(raised.value).splitlines()) <= 2


def test_open_from_a_thread_that_ends_keeps_the_host(pocket_root, appworld_venv):
    """The kernel's death signal counts threads as parents: a host must outlive the thread that started it."""
    task = split_ids(pocket_root)[0]
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv)
    opened = []
    thread = threading.Thread(target=lambda: opened.append(environments.open(task)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with environments, opened[0] as episode:
        assert episode.step("print(1)").failure is None
        assert episode.step("raise Exception").failure is FailureKind.RUNTIME


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_fork_of_the_trainer_is_refused(pocket_root, appworld_venv, kind):
    options = {"venv": appworld_venv} if kind == "local" else {"urls": ["http://127.0.0.1:9"]}
    with AppWorldEnvironments(pocket_root, **options) as environments:
        task = split_ids(pocket_root)[0]
        calls = [lambda: environments.open(task)]
        if kind == "local":
            calls.append(lambda: environments.prefetch([task]))
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            for call in calls:
                try:
                    call()
                except SetupError as error:
                    os.write(writer, f"{error}\n".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            lines = told.read().splitlines()
        os.waitpid(child, 0)
    assert len(lines) == len(calls)
    assert all(f"belongs to process {os.getpid()}" in line for line in lines)
