"""Tests of episodes on AppWorld's own servers, and of the values that their environment refuses."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments, share_urls
from gvpo_trl.environments.checks import check_environment
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault, SetupError
from tests.environments.support import solution, split_ids
from tests.environments.test_episodes import FIXED, LOGIN, TABLE

K = FailureKind


def test_every_row_of_the_table_of_texts(remote, task):
    printed = [row for row in FIXED if row[1] is K.OUTPUT]
    with remote.open(task) as episode:
        for code, kind, text in TABLE + printed:
            result = episode.step(code)
            assert result.failure == kind, f"{code!r}: {result}"
            assert text in result.text, f"{code!r}: {result.text[-500:]!r}"
            assert not result.completed and not result.ended and result.api_calls == ()
        assert episode.step("print(x, 6 * 7)").text == "3 42\n"
        assert not episode.score().success


def test_output_without_bounds_is_not_read_to_its_end(servers, task):
    rows = [("print('é\\\\\\u0001' * 1_000_000)", ("é\\\x01" * 334)[:1000]), ("print('x' * 1001)", "x" * 1000)]
    with RemoteEnvironments(servers.urls, max_output_chars=1000).start() as small, small.open(task) as episode:
        for code, beginning in rows:
            result = episode.step(code)
            assert result.failure is K.OUTPUT
            assert result.text.startswith(beginning + "\n[") and result.text.endswith(" characters more were cut]")
        assert episode.step("raise ValueError('x' * 2000)").failure is K.RUNTIME
        assert episode.step("print(1)").text == "1\n"


def test_scores_and_texts_equal_those_of_the_local_environment(servers, environments, pocket_root):
    remote = RemoteEnvironments(servers.urls, root=pocket_root)

    def play(env, task_id, codes):
        with env.open(task_id) as episode:
            steps = [episode.step(code) for code in codes]
            score = episode.score()
        seen = [(step.text, step.failure, step.completed, step.ended) for step in steps]
        return seen, score.passed, score.failed

    for task_id in split_ids(pocket_root)[::24]:
        steps = re.split(r"\n(?=\S)", solution(pocket_root, task_id).strip())
        for codes in ([], steps, ["print(1)", "apis.supervisor.complete_task(status='fail')"]):
            assert play(remote, task_id, codes) == play(environments, task_id, codes)
    remote.close()


def test_completion_is_asked_of_the_world(remote, task):
    with remote.open(task) as episode:
        assert not episode.step("print('complete_task')").completed
        assert episode.step("apis.supervisor.complete_task(status='fail')").completed
        assert episode.step("a = (").completed, "it stays so"


def test_two_episodes_of_one_task_keep_apart(remote, pocket_root, task):
    with remote.open(task) as solver, remote.open(task) as other:
        other.step("mine = 1")
        assert solver.step(solution(pocket_root, task)).completed
        assert not other.step("print(1)").completed
        assert solver.step("mine").failure is K.RUNTIME
        with ThreadPoolExecutor(2) as pool:
            solved, untouched = pool.map(lambda episode: episode.score(), (solver, other))
    assert solved.success and untouched.failed


def test_a_logout_does_not_reach_the_next_episode(alone, task):
    show = "apis.simple_note.show_account(access_token=token)"
    with alone.open(task) as first:
        assert first.step(LOGIN + "\napis.simple_note.logout(access_token=token)").failure is None
        assert first.step(show).failure is K.API
    with alone.open(task) as second:
        assert second.step(LOGIN + show).failure is None


def test_it_is_undone_even_when_no_more_executions_are_allowed(servers, task):
    with RemoteEnvironments(servers.urls[:1], max_interactions=1) as limited:
        with limited.open(task) as first:
            first.step(LOGIN + "\napis.simple_note.logout(access_token=token)")
            assert "Maximum number of executions (1) reached" in first.step("print(1)").text
        with limited.open(task) as second:
            step = second.step(LOGIN + "apis.simple_note.show_account(access_token=token)")
            assert step.failure is None, step.text


def test_use_after_the_end_is_a_fault(remote, task):
    with remote.open(task) as episode:
        episode.score()
        with pytest.raises(EpisodeFault, match="no more steps"):
            episode.step("print(1)")
    episode.close()
    with pytest.raises(EpisodeFault):
        episode.step("print(1)")
    with pytest.raises(EpisodeFault, match="closed"):
        episode.score()


def test_unknown_tasks(remote, alone, task):
    with pytest.raises(SetupError, match="unknown"):
        remote.open("no such task")
    with pytest.raises(SetupError, match="name of a task"):
        alone.open("")
    with pytest.raises(EpisodeFault, match=r"has no such task.*--root"):
        alone.open("no such task")
    with alone.open(task) as episode:
        assert episode.step("print(1)").failure is None


@pytest.mark.parametrize(
    "code", ["print('\\udcff')", "raise KeyboardInterrupt", "class E(BaseException): pass\nraise E"]
)
def test_what_the_server_cannot_put_into_words_is_a_fault(alone, task, code):
    with alone.open(task) as episode:
        with pytest.raises(EpisodeFault, match="could not say"):
            episode.step(code)
        with pytest.raises(EpisodeFault):
            episode.step("print(1)")
    with alone.open(task) as episode:
        assert episode.step("print(1)").text == "1\n"


def test_a_server_keeps_one_folder_a_task(servers, remote, task):
    for _ in range(3):
        remote.open(task).close()
    folders = list(servers.outputs.glob(f"{remote.experiment}-*/tasks/{task}"))
    assert 1 <= len(folders) <= 2


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "at least one"),
        ("http://localhost:8001", "must be a list"),
        (["localhost:8001"], "http://"),
        (["ftp://localhost"], "http://"),
        (["http://:8001"], "names no host"),
        (["http://localhost:port"], "malformed"),
        (["http://localhost:99999"], "malformed"),
        (["http://me:secret@localhost"], "user name"),
        (["http://localhost/?a=1"], "alone"),
        ([8001], "must be a text"),
        (["http://localhost:8001", "http://127.0.0.1:8001/"], "are one server"),
        (["http://Host:80", "http://host"], "are one server"),
    ],
)
def test_addresses_are_checked(urls, message):
    with pytest.raises(SetupError, match=message):
        RemoteEnvironments(urls)


def test_each_process_of_a_distributed_run_gets_servers_of_its_own():
    urls = [f"http://127.0.0.1:{port}" for port in range(8001, 8006)]
    shares = [share_urls(urls, rank, 3) for rank in range(3)]
    assert shares == [[urls[0], urls[3]], [urls[1], urls[4]], [urls[2]]]
    assert share_urls(tuple(urls), 0, 1) == urls
    with pytest.raises(SetupError, match=r"5 servers for 6 processes.*start at least 6 servers"):
        share_urls(urls, 0, 6)
    with pytest.raises(SetupError, match="must be a list"):
        share_urls(urls[0], 0, 1)


@pytest.mark.parametrize("name", ["step_timeout_s", "open_timeout_s", "evaluate_timeout_s", "max_output_chars"])
def test_numbers_are_checked(name):
    with pytest.raises(SetupError, match=f"{name}=0"):
        RemoteEnvironments(["http://localhost:8001"], **{name: 0})


def test_it_passes_the_conformance_test(remote, task):
    # Leaves a server that hangs: the last test with real ones.
    assert len(check_environment(remote, task)) == 11
