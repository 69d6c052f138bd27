"""What agent code can make the other processes hold: bounded while it is caused."""

import os
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments, client
from gvpo_trl.environments.appworld.engine.worlds import patches
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import SetupError
from tests.environments.attacks import PRELUDE
from tests.environments.attacks_on_rows import FORGED
from tests.environments.support import solution, split_ids


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.fixture(scope="module")
def small(pocket_root, appworld_venv):
    """Episodes with little room for texts."""
    options = {"venv": appworld_venv, "rehearse": False, "step_timeout_s": 20, "max_output_chars": 10_000}
    with AppWorldEnvironments(pocket_root, **options) as environments:
        yield environments


def test_calls_to_unknown_names_are_not_kept(small, task):
    with small.open(task) as episode:
        episode.step(PRELUDE)
        code = "for i in range(3_000):\n    ask('x', f'{i}' + 'y' * 150, {})\napis.api_docs.show_app_descriptions()"
        result = episode.step(code)
        assert result.failure is None
        assert result.api_calls == ("api_docs.show_app_descriptions",)


def test_the_endpoint_that_ran_is_the_one_that_is_recorded(small, task):
    with small.open(task) as episode:
        results = [
            episode.step("apis.simple_note.show_note(note_id='../../spotify/genres')"),
            episode.step("apis.simple_note.show_note(note_id='', raise_on_failure=False)"),
            episode.step("apis.simple_note.show_note(note_id='../../dbs', raise_on_failure=False)"),
        ]
    assert [result.api_calls for result in results] == [
        ("spotify.show_genres",),
        ("simple_note.search_notes",),
        ("simple_note.show_note",),
    ]


def test_a_forged_log_is_cut(small, task):
    with small.open(task) as episode:
        episode.step(PRELUDE)
        forged = FORGED + "forging(logged={'input': 'x' * 500_000, 'output': '\\U0001f600' * 20_000})"
        episode.step(forged)
        assert episode.step("print(1)").text == "ok"
        assert episode.score().failed
        log = episode.output / "tasks" / task / "logs" / "environment_io.md"
        assert len(log.read_text()) < 60_000


def test_an_answer_of_many_values_is_no_result(small, task):
    forged = FORGED + "forging(frame(b'{\"text\": \"x\", \"verdict\": [' + b'{},' * 200_000 + b'1]}'))"
    with small.open(task) as episode:
        episode.step(PRELUDE)
        episode.step(forged)
        result = episode.step("print(1)")
        assert result.failure is FailureKind.FORBIDDEN and "more than 100000 values" in result.text
        assert episode.score().failed


def test_a_call_of_many_values_is_an_ordinary_error(small, task):
    code = "apis.simple_note.create_note(title=[{}] * 60_000)"
    with small.open(task) as episode:
        result = episode.step(code)
        assert result.failure is FailureKind.RUNTIME and "more than 100000 values" in result.text
        assert episode.step("print(1)").text == "1\n"


def test_a_log_that_is_full_goes_on_in_brief_and_then_stops(monkeypatch):
    monkeypatch.setattr(patches, "loggable", lambda request, whole=True: request if whole else {"brief": True})
    requests = []
    log = patches.RequestLog(requests)
    kept = []
    for _ in range(patches.LOGGED_IN_BRIEF + 100):
        requests.append({"method": "get", "url": "x", "data": {"a": [0] * 10_000}})
        kept += log.bound_from(len(requests) - 1, size=10)
    whole = [request for request in kept if "data" in request]
    assert 15 <= len(whole) <= 20
    assert len(kept) == len(whole) + patches.LOGGED_IN_BRIEF
    assert len(requests) == patches.LOGGED_IN_BRIEF + 100, "AppWorld counts a step's requests by the list's length"
    assert requests[-1] is patches.NOT_LOGGED


def test_bytes_alone_fill_the_log(monkeypatch):
    monkeypatch.setattr(patches, "loggable", lambda request, whole=True: request if whole else {"brief": True})
    requests = [{"method": "get", "url": "x", "data": {}}]
    log = patches.RequestLog(requests)
    assert log.bound_from(0, size=patches.LOGGED_BYTES) == requests
    requests.append({"method": "get", "url": "x", "data": {}})
    assert log.bound_from(1, size=1) == [{"brief": True}]


def test_a_row_with_a_full_log_is_scored_by_its_state(small, task, pocket_root):
    flood = "\n".join(
        [
            "slow = frame(message('simple_note', 'create_note', {'title': 1, 'junk': [{'': 0}] * 1080}))",
            "for _ in range(300):\n    put(pipes[1], slow)\n    take_frame(pipes[1])",
        ]
    )
    with small.open(task) as episode:
        episode.step(PRELUDE)
        assert episode.step(flood).failure is None
        assert episode.step(solution(pocket_root, task)).failure is None
        assert episode.score().reward == 1.0
        log = (episode.output / "tasks" / task / "logs" / "api_calls.jsonl").read_text()
        assert len(log) < 3_000_000 and len(log.splitlines()) > 300


def test_children_volunteer_for_the_oom_killer_and_hosts_do_not(small, task):
    def adjustment(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with small.open(task) as episode:
        episode.step("print(1)")
        for keeper in (small.machinery.worlds, small.machinery.agents):
            host = keeper.get().process.pid
            children = Path(f"/proc/{host}/task/{host}/children").read_text().split()
            assert children and {adjustment(int(child)) for child in children} == {1000}
            assert adjustment(host) == adjustment(os.getpid())


def test_a_text_that_fills_the_memory_is_a_failure_and_does_not_end_the_interpreter(small, task):
    code = "room = None\nroom = __import__('mmap').mmap(-1, {} * 10**6)\nprint('a' * 10**8)"
    with small.open(task) as episode:
        for megabytes in range(2_500, 4_000, 50):
            result = episode.step(code.format(megabytes))
            assert not result.ended, result.text
            if result.failure is not FailureKind.OUTPUT:
                break
        assert result.failure is FailureKind.MEMORY
        assert episode.step("room = None\nprint(2)").text == "2\n"


@pytest.mark.parametrize("character", ["\U0001f600", "\x00", "a"])
def test_a_text_below_the_limit_arrives_whatever_its_characters_are(pocket_root, appworld_venv, task, character):
    most = client.MAX_OUTPUT_CHARS
    options = {"venv": appworld_venv, "rehearse": False, "max_output_chars": most}
    with AppWorldEnvironments(pocket_root, **options) as environments, environments.open(task) as episode:
        whole = episode.step(f"print({character!r} * {most - 1})")
        assert (whole.failure, whole.text) == (None, character * (most - 1) + "\n")
        assert episode.step(f"# {character}".replace("\0", "") * (most // 4) + "\nprint('x')").text == "x\n"
        assert episode.step(f"print({character!r} * {most})").failure is FailureKind.OUTPUT
        assert episode.score().failed


def test_a_limit_of_texts_that_no_message_can_hold_is_refused(pocket_root, appworld_venv):
    with pytest.raises(SetupError, match="max_output_chars=2000000 must be at most 1500000"):
        AppWorldEnvironments(pocket_root, venv=appworld_venv, max_output_chars=2_000_000)
