"""The run-time patches change nothing that one can see: fast and plain episodes compared on the pocket tasks."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.failures import FailureKind
from tests.environments.support import solution, split_ids
from tests.environments.test_episodes import FIXED, TABLE

PROBES = [
    "print(apis.api_docs.show_app_descriptions())",
    "import random, uuid, datetime, time\nprint(random.random(), datetime.datetime.now(), time.time())",
    "print(DateTime.now(), In[-1] if 'In' in globals() else '', get_ipython().execution_count)",
    "print(sorted(n for n in globals() if not n.startswith('_')))",
    "print(apis.supervisor.show_profile(), apis.supervisor.show_active_task())",
    "print([apis.api_docs.show_api_descriptions(app_name=a['name']) for a in apis.api_docs.show_app_descriptions()])",
    "print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))",
    "print(apis.phone.nope())",
    "open('x', 'w')",
    "print(len(requester.requests))",
]


@pytest.fixture(scope="module")
def pair(pocket_root, appworld_venv):
    # On a busy machine a deadline that is met in one mode only would be a difference.
    options = {"venv": appworld_venv, "max_episodes": 4, "step_timeout_s": 60}
    plain = AppWorldEnvironments(pocket_root, fast=False, **options)
    with plain, AppWorldEnvironments(pocket_root, fast=True, **options) as fast:
        yield plain, fast


def play(environments, task_id, codes):
    """Everything that can be seen of an episode: results, test results, saved files."""
    with environments.open(task_id) as episode:
        results = [episode.step(code) for code in codes]
        score = episode.score()
        folder = episode.output / "tasks" / task_id
        files = {
            str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
        }
    seen = [(r.text, r.failure, r.completed, r.ended, r.api_calls) for r in results]
    return seen, (score.passed, score.failed), files


def compare(pair, task_id, codes):
    plain, fast = (play(environments, task_id, codes) for environments in pair)
    assert plain[0] == fast[0]
    assert plain[1] == fast[1]
    assert plain[2].keys() == fast[2].keys()
    for name, text in plain[2].items():
        assert _ordered(name, text) == _ordered(name, fast[2][name]), name


def _ordered(name, text):
    return json.loads(text) if name.endswith("hashes.json") else text


def test_reference_solutions_of_every_task_give_the_same(pair, pocket_root):
    splits = ("train", "dev", "test_normal", "test_challenge")
    task_ids = [task_id for split in splits for task_id in split_ids(pocket_root, split)]

    def check(task_id):
        steps = re.split(r"\n(?=\S)", solution(pocket_root, task_id).strip())
        compare(pair, task_id, steps)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, task_ids))


def test_the_table_of_texts_and_other_probes_give_the_same(pair, pocket_root):
    codes = [code for code, kind, _ in TABLE + FIXED if kind is not FailureKind.TIMEOUT]
    compare(pair, split_ids(pocket_root)[0], codes + PROBES)
    compare(pair, split_ids(pocket_root)[-1], PROBES)


def test_an_untouched_world_gives_the_same(pair, pocket_root):
    for task_id in split_ids(pocket_root)[::24]:
        compare(pair, task_id, [])


@pytest.mark.parametrize("before", ["print(1)", "SOLUTION"])
def test_a_killed_episode_is_scored_alike(pair, pocket_root, before):
    task_id = split_ids(pocket_root)[0]
    codes = [solution(pocket_root, task_id) if before == "SOLUTION" else before, "__import__('ctypes').string_at(0)"]
    plain, fast = (play(environments, task_id, codes)[:2] for environments in pair)
    assert plain == fast
    assert bool(plain[1][1]) == (before != "SOLUTION")


@pytest.fixture(scope="module")
def process_pair(pocket_root, appworld_venv):
    """The same two with the agent's code in the world's process."""
    options = {"venv": appworld_venv, "isolation": "process", "max_episodes": 4, "step_timeout_s": 60}
    plain = AppWorldEnvironments(pocket_root, fast=False, **options)
    with plain, AppWorldEnvironments(pocket_root, fast=True, **options) as fast:
        yield plain, fast


def test_solutions_beside_their_world_give_the_same(process_pair, pocket_root):
    for task_id in split_ids(pocket_root, "test_challenge")[::7]:
        compare(process_pair, task_id, re.split(r"\n(?=\S)", solution(pocket_root, task_id).strip()))


@pytest.mark.parametrize("spoil", ["nothing", "deleted", "cut", "garbled at the end"])
def test_a_world_that_dies_leaves_the_state_of_its_last_finished_step(process_pair, pocket_root, spoil):
    def play(environments, codes, spoilt):
        with environments.open(task_id) as episode:
            output = episode.output
            for number, code in enumerate(codes):
                episode.step(code)
                if spoilt and number == len(codes) // 2:
                    spoil_journal(output / "changes.jsonl", spoil)
            assert episode.step("__import__('ctypes').string_at(0)").ended
            if len(codes) == whole:
                assert (output / "changes.jsonl").exists() == spoilt
            if spoilt and spoil == "garbled at the end":
                spoil_journal(output / "changes.jsonl", spoil)
            score = episode.score()
            folder = output / "tasks" / task_id / "dbs"
            files = {path.name: _ordered(path.name, path.read_text()) for path in folder.iterdir()}
        return (score.passed, score.failed), files

    for task_id in split_ids(pocket_root)[3::20]:
        codes = re.split(r"\n(?=\S)", solution(pocket_root, task_id).strip())
        whole = len(codes)
        for count in (whole, whole // 2 + 2):
            plain, fast = process_pair
            assert play(plain, codes[:count], False) == play(fast, codes[:count], True)


def spoil_journal(path, spoil):
    if path.exists() and spoil == "deleted":
        path.unlink()
    if path.exists() and spoil == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    if path.exists() and spoil == "garbled at the end":
        path.write_bytes(path.read_bytes() + b'{"changes": {"venm')


def test_calls_made_in_the_rehearsal_leave_no_trace(pair, pocket_root):
    docs = "print(apis.api_docs.show_api_doc(app_name='simple_note', api_name='create_note'))"
    looks = [
        docs,
        docs,
        docs.replace("create_note", "nope"),
        "print(apis.api_docs.show_api_descriptions(app_name='x'))",
    ]
    every = """
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
profile = apis.supervisor.show_profile()
for app in sorted(passwords):
    for username in (profile["email"], profile["phone_number"]):
        try:
            token = apis[app].login(username=username, password=passwords[app])["access_token"]
        except Exception:
            continue
        print(app, token)
        for api in sorted(apis[app]):
            if api.startswith(("show_", "search_")):
                try:
                    print(api, apis[app][api](access_token=token))
                except Exception as error:
                    print(api, error)
"""
    for task_id in split_ids(pocket_root)[:60:29]:
        compare(pair, task_id, [*looks, every])
