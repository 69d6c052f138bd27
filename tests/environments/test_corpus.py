"""What the agent sees is, to the letter, what AppWorld's own `execute` prints: the corpus played both ways."""

import difflib
import itertools
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.setup import appworld_python
from tests.environments.corpus import DIFFERENT, TIGHT, Different, Script, scripts
from tests.environments.support import solution

pytestmark = pytest.mark.slow
SCRIPTS = {script.name: script for script in scripts()}
WORKER = Path(__file__).with_name("corpus_worker.py")
# On a busy machine a deadline that is met one way only would be a difference.
WIDE = {"step_timeout_s": 120, "max_interactions": 1000}
SHOWN_LINES = 40


@dataclass(frozen=True, repr=False)
class Seen:
    """What can be seen of an episode."""

    texts: list[str]
    files: dict[str, str]
    passed: list[str]
    failed: list[str]


def task_of(script: Script, root: Path) -> str:
    for folder in sorted((root / "data" / "tasks").iterdir()):
        if json.loads((folder / "ground_truth" / "pocket.json").read_text())["family"] == script.family:
            return folder.name
    raise AssertionError(f"no pocket task is of the family {script.family!r}")


def codes_of(script: Script, root: Path) -> list[str]:
    last = [solution(root, task_of(script, root))] if script.solved else []
    return [*script.snippets.values(), *last]


@pytest.fixture(scope="module")
def plain(pocket_root, appworld_venv, tmp_path_factory):
    """The corpus on AppWorld as it is."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "data").symlink_to(pocket_root / "data")
    episodes = []
    for script in SCRIPTS.values():
        limits = TIGHT if script.tight else WIDE
        episodes.append(
            {
                "name": script.name,
                "task_id": task_of(script, pocket_root),
                "codes": codes_of(script, pocket_root),
                "timeout_s": limits["step_timeout_s"],
                "max_interactions": limits["max_interactions"],
            }
        )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "APPWORLD"))}
    result = subprocess.run(
        [appworld_python(appworld_venv), "-I", WORKER, folder],
        input=json.dumps(episodes),
        env=kept | {"APPWORLD_ROOT": str(folder), "APPWORLD_CACHE": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return {name: Seen(**json.loads((folder / f"{name}.json").read_text())) for name in SCRIPTS}


@pytest.fixture(scope="module", params=["split", "process"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def ours(mode, pocket_root, appworld_venv):
    """The corpus in our episodes, each a future that is done: what broke in one is told by its own tests."""
    options = {"isolation": mode, "venv": appworld_venv, "max_episodes": 2}

    def play(script: Script) -> Seen:
        task_id = task_of(script, pocket_root)
        with (tight if script.tight else wide).open(task_id) as episode:
            texts = [episode.step(code).text for code in codes_of(script, pocket_root)]
            score = episode.score()
            folder = episode.output / "tasks" / task_id
            files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        return Seen(texts, files, list(score.passed), list(score.failed))

    with (
        AppWorldEnvironments(pocket_root, **WIDE, **options) as wide,
        AppWorldEnvironments(pocket_root, **TIGHT, **options, rehearse=False) as tight,
        ThreadPoolExecutor(2) as pool,
    ):
        futures = {name: pool.submit(play, script) for name, script in SCRIPTS.items()}
        wait(futures.values())
    return futures


def different_in(mode: str) -> dict[str, Different]:
    return {name: entry for name, entry in DIFFERENT.items() if mode in entry.modes}


def unlike(name: str, expected: str, found: str) -> str:
    """The lines in which two texts differ; empty when they do not."""
    if expected == found:
        return ""
    pair = (text.splitlines(keepends=True) for text in (expected, found))
    lines = [line.rstrip("\n")[:200] for line in difflib.unified_diff(*pair, "AppWorld", "ours", n=1)]
    return "\n".join([f"--- {name}", *lines[:SHOWN_LINES], *(["..."] if len(lines) > SHOWN_LINES else [])])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_texts_are_equal(name, plain, ours, mode):
    names = [*SCRIPTS[name].snippets, *(["the reference solution"] if SCRIPTS[name].solved else [])]
    on_purpose = different_in(mode)
    report = []
    for snippet, expected, found in zip(names, plain[name].texts, ours[name].result().texts, strict=True):
        if snippet in on_purpose:
            assert expected == on_purpose[snippet].plain != found == on_purpose[snippet].ours, snippet
        else:
            report.append(unlike(snippet, expected, found))
    assert not any(report), "\n" + "\n".join(filter(None, report))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_call_logs_and_the_saved_state_are_equal(name, plain, ours, mode):
    expected, found = plain[name].files, ours[name].result().files
    assert expected.keys() == found.keys()
    logs_differ = different_in(mode).keys() & SCRIPTS[name].snippets.keys()
    report = []
    for path in sorted(expected):
        if not (path.startswith("logs/") and logs_differ):
            report.append(unlike(path, as_compared(path, expected[path], name), as_compared(path, found[path], name)))
    assert not any(report), "\n" + "\n".join(filter(None, report))


def as_compared(path: str, text: str, name: str) -> str:
    if path.endswith("hashes.json"):
        return json.dumps(json.loads(text), sort_keys=True, indent=1)
    if path == "logs/api_calls.jsonl" and SCRIPTS[name].tight:
        # How many calls fit in the time until a time-out is not the same twice.
        return "".join(line for line, _ in itertools.groupby(text.splitlines(keepends=True)))
    return text


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_test_results_are_equal(name, plain, ours):
    expected, found = plain[name], ours[name].result()
    assert (expected.passed, expected.failed) == (found.passed, found.failed)
    if SCRIPTS[name].solved:
        assert expected.passed, "the snippets change more than the task asks for, so its last test may fail"


def test_the_corpus_is_large_and_knows_its_names():
    names = [name for script in SCRIPTS.values() for name in script.snippets]
    assert len(names) >= 800
    assert {name: names.count(name) for name in DIFFERENT} == dict.fromkeys(DIFFERENT, 1)
