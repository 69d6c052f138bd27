"""Attempts at the reward, as agent code on the real engine: stopped by the split, and at work without it.

`attack_worker.py` makes each of them as root and as an ordinary user, if the tests run as root. The signs that one
worked are looked for outside of it: secrets in texts, another reward, files, ended processes, messages, lost rows.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gvpo_trl import sandbox
from tests.environments.attacks import TASKS, Sign, every_attack
from tests.environments.support import processes_below, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sandbox.probe().level != "full", reason="; ".join(sandbox.probe().missing)),
]
REPOSITORY = Path(__file__).resolve().parents[2]
ORDINARY = 12345
"""An ordinary user, who owns only what a test gives them."""
USERS = ["root", "ordinary"] if os.geteuid() == 0 and sandbox.probe().setuid else ["ordinary"]
ATTACKS = every_attack()
CONTROLLED = [name for name, attack in ATTACKS.items() if attack.control]
DEADLINE_S = 600


@pytest.fixture(scope="module", params=USERS)
def play(request, pocket_root: Path, appworld_venv: Path) -> Callable[[str], dict]:
    """A function that makes all attempts of a mode, once, and returns the worker's report."""
    folder = Path(tempfile.mkdtemp(prefix="gvpo-attacks-"))
    folder.chmod(0o755)
    becomes = request.param == "ordinary" and os.geteuid() == 0
    venv, repository = appworld_venv, REPOSITORY
    if becomes:
        venv, repository = lend(appworld_venv, folder), lend_sources(folder)
    outcomes = {}

    def outcome(mode: str) -> dict:
        if mode not in outcomes:
            outcomes[mode] = None
            work = set_out(folder / mode, mode, pocket_root, venv, ORDINARY if becomes else None)
            outcomes[mode] = run_worker(work, repository, ORDINARY if becomes else None)
        assert outcomes[mode] is not None, "the attempts could not be made; see the first test that asked for them"
        return outcomes[mode]

    yield outcome
    shutil.rmtree(folder)


def run_worker(work: dict, repository: Path, user: int | None) -> dict:
    """Make the attempts as a user, or as ourselves."""
    variables = {"PATH": os.environ["PATH"], "HF_TOKEN": work["secrets"]["token"], "HOME": work["folder"]}
    become = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    worker = subprocess.run(
        [f"{work['venv']}/bin/python", "-I", repository / "tests/environments/attack_worker.py", repository],
        **become,
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd=work["folder"],
        env=variables,
        timeout=DEADLINE_S,
    )
    assert worker.returncode == 0, worker.stderr[-4000:]
    return json.loads(worker.stdout)


def set_out(folder: Path, mode: str, pocket_root: Path, venv: Path, owner: int | None) -> dict:
    """A data root of its own, with secrets in it, a folder to work in, and the list of what to try."""
    root, work = folder / "root", folder / "work"
    work.mkdir(parents=True)
    instructions = {
        path.name: json.loads((path / "specs.json").read_text())["instruction"]
        for path in (pocket_root / "data" / "tasks").iterdir()
    }
    wanted = {task for task, text in instructions.items() if any(words in text for words in TASKS.values())}

    def left_out(path: str, names: list[str]) -> set[str]:
        unwanted = set(instructions) - wanted if path.endswith("data/tasks") else set()
        return {"__pycache__", "experiments"} | unwanted

    shutil.copytree(pocket_root, root, ignore=left_out)
    secrets = {name: f"{name}-{os.urandom(8).hex()}" for name in ("truth", "token", "file", "episode")}
    for path in root.glob("data/tasks/*/ground_truth/evaluation.py"):
        path.write_text(f"{path.read_text()}\n# {secrets['truth']}\n")
    (work / "secret").write_text(secrets["file"])
    (work / "secret").chmod(0o600)
    specs = [json.loads(path.read_text()) for path in root.glob("data/tasks/*/specs.json")]
    with sqlite3.connect(root / "data/base_dbs/venmo.db") as database:
        passwords = dict(database.execute("select email, password from users").fetchall())
    others = passwords.keys() - {spec["supervisor"]["email"] for spec in specs}
    secrets["password"] = passwords[min(others)]
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner)
    names = list(ATTACKS) if mode == "split" else [name for name in CONTROLLED if ATTACKS[name].control == mode]
    given = {"root": root, "venv": venv, "folder": work}
    return {name: str(path) for name, path in given.items()} | {"mode": mode, "secrets": secrets, "attacks": names}


def lend(venv: Path, folder: Path) -> Path:
    """AppWorld's environment where every user can reach it: itself, or a copy made of hard links."""
    python = (venv / "bin" / "python").resolve()
    if reachable(python) and reachable(venv / "pyvenv.cfg"):
        return venv
    base, library = python.parents[1], f"lib/python{python.name.removeprefix('python')}"
    for path in (python, *base.glob("lib/libpython*")):
        link(path, folder / "python" / path.relative_to(base))
    unneeded = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "tkinter", "__pycache__")
    shutil.copytree(base / library, folder / "python" / library, copy_function=link, ignore=unneeded)
    shutil.copytree(venv / "lib", folder / "venv" / "lib", copy_function=link, symlinks=True)
    (folder / "venv" / "bin").mkdir()
    (folder / "venv" / "bin" / "python3").symlink_to(folder / "python" / python.relative_to(base))
    (folder / "venv" / "pyvenv.cfg").write_text(f"home = {folder}/python/bin\ninclude-system-site-packages = false\n")
    start = folder / "venv" / "bin" / "python"
    start.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={folder}/python/lib exec {folder}/venv/bin/python3 "$@"\n')
    start.chmod(0o755)
    return folder / "venv"


def lend_sources(folder: Path) -> Path:
    """This repository where every user can reach it: itself, or a copy of its code."""
    if reachable(Path(__file__)) and reachable(Path(sandbox.__file__)):
        return REPOSITORY
    for name in ("gvpo_trl", "tests/environments"):
        shutil.copytree(REPOSITORY / name, folder / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "code"


def reachable(path: Path) -> bool:
    """Whether any user may read the file."""
    return bool(path.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def link(source: str | Path, target: str | Path) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def describe(record: dict) -> str:
    """A report on an attempt that did not come out as it should."""
    steps = "\n".join(f"{step['failure']}: {step['text'][-600:]}" for step in record["steps"])
    return f"{record['signs']}, reward {record['reward']}, honest {record['honest']}, {record['fault']}\n{steps}"


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_stopped_and_the_row_is_scored(play, name):
    record = play("split")["records"][name]
    assert record["signs"] == [], describe(record)
    assert record["reward"] == record["honest"]


@pytest.mark.parametrize("name", CONTROLLED)
def test_it_works_without_the_defence(play, name):
    attack = ATTACKS[name]
    record = play(attack.control)["records"][name]
    assert attack.sign in record["signs"], describe(record)


def test_nothing_is_changed_or_left_and_nobody_is_disturbed(play):
    outcome = play("split")
    assert outcome["changed"] == []
    assert outcome["disturbed"] == []
    assert wait_until(lambda: not processes_below(outcome["folder"])), processes_below(outcome["folder"])


def test_the_ground_truth_is_within_reach_without_the_defence(play):
    assert any(name.endswith("ground_truth/evaluation.py") for name in play("process")["changed"])


def test_a_verdict_is_not_protected_and_moves_no_reward(play):
    record = play("split")["records"]["spoofs: a verdict"]
    assert record["steps"][-1]["failure"] is None and record["reward"] == record["honest"] == 0


def test_the_honest_rewards_are_those_that_the_attempts_are_measured_by(play):
    records = play("split")["records"]
    assert {records[name]["honest"] for name in ATTACKS if ATTACKS[name].honest == ("exec(SOLUTION)",)} == {1.0}
    assert {records[name]["honest"] for name in ATTACKS if not ATTACKS[name].honest} == {0.0}


def test_there_are_enough_of_every_kind():
    kinds = {ATTACKS[name].kind for name in CONTROLLED}
    assert len(CONTROLLED) >= 40
    assert {ATTACKS[name].sign for name in CONTROLLED} >= set(Sign) - {Sign.LATE}
    assert kinds >= {"open", "loaders", "evaluator", "/proc", "links", "frames and gc", "admin", "raw", "routes"}
    assert kinds >= {"model writes", "passwords", "collateral", "saved output", "afterwards", "processes", "resources"}
    assert kinds >= {"output", "sockets", "signals", "messages", "replies", "spoofs", "deaths"}
