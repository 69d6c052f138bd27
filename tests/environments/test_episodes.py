"""Tests of episodes on the real engine: verdicts, texts, deadlines, isolation, scores."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.checks import check_environment
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault, SetupError
from tests.environments.support import solution, split_ids

K = FailureKind
LOGIN = """
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = apis.simple_note.login(
    username=apis.supervisor.show_profile()["email"], password=passwords["simple_note"]
)["access_token"]
"""
FAILED = "Execution failed. Traceback:\n"
TABLE = [
    ("print('hello')", None, "hello\n"),
    ("x = 3\nx", None, "Execution successful."),
    ("# nothing", None, "Execution successful."),
    ("print([1, 2])", None, "[1, 2]\n"),
    ("raise KeyError('x')", K.RUNTIME, FAILED + '  File "<python-input>", line 1, in <module>\n'),
    ("print('lost')\n1 / 0", K.RUNTIME, FAILED + '  File "<python-input>", line 2, in <module>\n'),
    ("apis.simple_note.show_account()", K.API, "Exception: Response status code is 401:"),
    ("apis.simple_note.login(username='a@b.cd', password=1)", K.API, "Exception: Response status code is "),
    ("apis.simple_note.login()", K.API, "Exception: Response status code is 422:"),
    ("apis.simple_note.nope()", K.RUNTIME, "Exception: No API named 'nope' found in the simple_note app."),
    ("try:\n    apis.simple_note.show_account()\nexcept Exception:\n    print('caught')", None, "caught\n"),
    ("a = (", K.SYNTAX, FAILED + "Syntax error in line:\na = (\nMessage: '(' was never closed"),
    ("```python\nprint(1)\n```", K.SYNTAX, FAILED + "Syntax error in line:\n"),
    ("%timeit 1", K.SYNTAX, FAILED + "Syntax error in line:\n"),
    ("!ls", K.SYNTAX, FAILED + "Syntax error in line:\n"),
    ("return 1", K.SYNTAX, "SyntaxError: 'return' outside function"),
    ("eval('1 +')", K.RUNTIME, "SyntaxError: invalid syntax"),
    ("import os\nos.listdir('.')", K.FORBIDDEN, FAILED + "Usage of the following function is not allowed: os.list"),
    ("import socket", K.FORBIDDEN, FAILED + "Usage of the following module is not allowed: socket."),
    ("", K.NO_CODE, "No code available to execute."),
    ("  \n ", K.NO_CODE, "No code available to execute."),
    ("x = 'a' * 10 ** 11", K.MEMORY, "MemoryError"),
    ("def f():\n    f()\nf()", K.RUNTIME, "RecursionError: maximum recursion depth exceeded"),
    ("while True:\n    pass", K.TIMEOUT, "Exception: Execution timed out after 4 seconds."),
    ("raise SystemExit", K.RUNTIME, "raise SystemExit\nException"),
    ("input()", K.RUNTIME, "Exception: input(..) is not allowed."),
    # The text that code prints or raises does not decide the verdict.
    ("print('Execution failed. Traceback:')", None, "Execution failed. Traceback:\n"),
    ("print('Exception: Response status code is 409:')", None, "Exception: Response status code is 409:\n"),
    ("print('No code available to execute.')", None, "No code available to execute.\n"),
    ("raise Exception('Response status code is 409:')", K.RUNTIME, "Exception: Response status code is 409:"),
    ("raise TimeoutError('Execution timed out after 4 seconds.')", K.RUNTIME, "TimeoutError: "),
]
FIXED = [
    ("print('\\udcff')", None, "\\udcff\n"),  # AppWorld would fail to write its log
    ("print('x' * 2_000_000)", K.OUTPUT, "[1000001 characters more were cut]"),
]


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.fixture(scope="module")
def plain(pocket_root, appworld_venv):
    """Episodes whose agent code runs in the world's process."""
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    options = {"venv": appworld_venv, "rehearse": False, "step_timeout_s": 4}
    with AppWorldEnvironments(pocket_root, isolation="process", **options) as environments:
        yield environments


@pytest.fixture
def episode(environments, task):
    with environments.open(task) as episode:
        yield episode


@pytest.mark.parametrize("isolation", ["split", "process"])
def test_every_row_of_the_table_of_texts(environments, plain, task, isolation):
    with (environments if isolation == "split" else plain).open(task) as episode:
        check_table(episode)


def check_table(episode):
    for code, kind, text in TABLE + FIXED:
        result = episode.step(code)
        assert result.failure == kind, f"{code!r}: {result}"
        assert text in result.text, f"{code!r}: {result.text[-500:]!r}"
        assert not result.completed and not result.ended
    assert episode.step("print(x, 6 * 7)").text == "3 42\n", "the episode goes on as if nothing had happened"


def test_the_limit_on_interactions_is_an_ordinary_failure(pocket_root, appworld_venv, task):
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    limited = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_interactions=2)
    with limited, limited.open(task) as episode:
        kinds = [episode.step("print(1)").failure for _ in range(3)]
    assert kinds == [None, None, K.RUNTIME]


def test_api_calls_and_completion_are_reported(episode):
    calls = episode.step(LOGIN).api_calls
    assert calls == ("supervisor.show_account_passwords", "supervisor.show_profile", "simple_note.login")
    assert episode.step("apis.api_docs.show_app_descriptions()").api_calls == ("api_docs.show_app_descriptions",)
    assert not episode.step("print('complete_task')").completed
    assert episode.step("apis.supervisor.complete_task(status='fail')").completed


def test_reference_solutions_pass_and_untouched_worlds_do_not(environments, pocket_root):
    def play(task_id):
        with environments.open(task_id) as episode:
            result = episode.step(solution(pocket_root, task_id))
            assert result.failure is None and result.completed, result.text
            solved = episode.score()
        with environments.open(task_id) as episode:
            untouched = episode.score()
        return solved, untouched

    with ThreadPoolExecutor(4) as pool:
        for solved, untouched in pool.map(play, split_ids(pocket_root)[::9]):
            assert solved.success and solved.reward == 1.0 and solved.failed == ()
            assert untouched.failed and not untouched.success
            assert set(solved.passed) == set(untouched.passed + untouched.failed)


def test_code_that_swallows_its_interruption_is_killed_and_scored(environments, task):
    # The loop is in a function of its own, because in Python 3.11 its jump back lies outside the handler around it.
    code = "def spin():\n    while True: sum(range(9))\nwhile True:\n    try: spin()\n    except BaseException: pass"
    with environments.open(task) as episode:
        started = time.monotonic()
        result = episode.step(code)
        assert time.monotonic() - started < environments.step_timeout_s + 2
        assert result.failure is K.TIMEOUT and result.ended
        assert result.text.endswith("Exception: Execution timed out after 4 seconds.")
        with pytest.raises(EpisodeFault, match="no more steps"):
            episode.step("print(1)")
        assert episode.score().failed


def test_a_killed_episode_is_scored_on_its_last_finished_step(environments, pocket_root, task):
    with environments.open(task) as episode:
        episode.step(solution(pocket_root, task))
        assert episode.step("__import__('ctypes').string_at(0)").failure is K.EXITED
        assert episode.score().success


@pytest.mark.parametrize(
    "code",
    [
        "raise KeyboardInterrupt",
        "class Own(BaseException): pass\nraise Own('x')",
        "__import__('ctypes').string_at(0)",
        "__import__('ctypes').CDLL(None)._exit(0)",
    ],
)
def test_code_that_ends_its_interpreter_ends_the_episode(environments, task, code):
    with environments.open(task) as episode:
        result = episode.step(code)
        assert result.failure is K.EXITED and result.ended and result.text.startswith("Execution failed. ")
        assert episode.score().failed


def test_eight_episodes_of_one_task_do_not_meet(environments, task):
    def play(number):
        with environments.open(task) as episode:
            episode.step(LOGIN)
            made = f"apis.simple_note.create_note(title='made by {number}', content='x', access_token=token)"
            assert episode.step(made).failure is None
            time.sleep(0.3)
            found = episode.step("print([n['title'] for n in apis.simple_note.search_notes(access_token=token)])").text
            return number, found

    with ThreadPoolExecutor(8) as pool:
        for number, found in pool.map(play, range(8)):
            assert found.count("made by") == 1 and f"made by {number}" in found


def test_a_slow_step_holds_up_nobody(environments, task):
    with environments.open(task) as slow, environments.open(task) as quick, ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow.step, "while True: pass")
        time.sleep(0.2)
        for _ in range(5):
            assert quick.step("print(1)").text == "1\n"
        assert not running.done()
        assert running.result().failure is K.TIMEOUT


def test_a_logout_does_not_reach_the_next_episode(environments, task):
    for _ in range(2):
        with environments.open(task) as episode:
            assert episode.step(LOGIN).failure is None
            assert episode.step("apis.simple_note.search_notes(access_token=token)").failure is None
            assert episode.step("apis.simple_note.logout(access_token=token)").failure is None
            assert episode.step("apis.simple_note.search_notes(access_token=token)").failure is K.API


def test_worlds_are_opened_without_ground_truth(episode, plain, task):
    code = """
gc = __import__('gc')
worlds = [o for o in gc.get_objects() if type(o).__name__ == "AppWorld" and o.task_id]
truths = [o for o in gc.get_objects() if type(o).__name__ == "GroundTruth"]
print(len(worlds), [w.task.ground_truth for w in worlds], len(truths))
"""
    assert episode.step(code).text == "0 [] 0\n", "an interpreter holds no world"
    with plain.open(task) as episode:
        assert episode.step(code).text == "1 [None] 0\n"


def test_time_goes_on_here_and_appworld_is_not_imported(environments, task):
    with environments.open(task) as episode:
        before = time.time(), time.monotonic()
        time.sleep(0.05)
        assert time.time() - before[0] > 0.04 and time.monotonic() - before[1] > 0.04
        assert episode.step("import datetime\nprint(datetime.datetime.now().year)").text == "2023\n"
    assert "appworld" not in sys.modules and "freezegun" not in sys.modules


def test_credentials_stay_here(pocket_root, appworld_venv, task, monkeypatch):
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "hidden-value")
    with (
        AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv) as environments,
        environments.open(task) as episode,
    ):
        result = episode.step("import os\nprint([n for n, v in os.environ.items() if v == 'hidden-value'])")
    assert result.text == "[]\n"


def test_output_folders_are_private_and_go_away(environments, pocket_root, task):
    with environments.open(task) as episode:
        assert list(episode.output.parent.iterdir()) == [episode.output]
        assert (episode.output / "tasks" / task).is_dir()
    assert list(episode.output.parent.iterdir()) == []
    assert not (pocket_root / "experiments" / "outputs" / "warm-up").exists()
    episode.close()


def test_unknown_tasks_name_the_nearest(environments, task):
    with pytest.raises(SetupError, match=task):
        environments.open(task + "0")
    with pytest.raises(SetupError):
        environments.open("../tasks/" + task)


def test_it_keeps_the_protocol(environments, plain, task):
    for each in (environments, plain):
        assert "deadline" in check_environment(each, task)


def test_no_descriptor_and_no_thread_is_left(environments, task):
    import threading

    def play():
        with environments.open(task) as episode:
            episode.step("print(1)")
            episode.score()

    play()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        play()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_base_databases_cannot_be_written_through_a_descriptor(environments, pocket_root, task):
    code = """
os = __import__('posix')
for fd in range(3, 64):
    try:
        target = os.readlink(f'/proc/self/fd/{fd}')
    except OSError:
        continue
    if target.endswith('.db'):
        print(target, __import__('fcntl').fcntl(fd, 3) & 3)
print('all')
"""
    with environments.open(task) as episode:
        lines = episode.step(code).text.splitlines()
    assert lines[-1] == "all" and all(line.endswith(" 0") for line in lines[:-1]), lines


def test_calls_that_a_time_out_breaks_off_are_no_misuse(environments, task):
    code = (
        LOGIN
        + """
note_id = apis.simple_note.create_note(title="x", content="y" * 500_000, access_token=token)["note_id"]
def calls():  # slow calls, so that the time is over before their number is too high
    while True:
        try:
            sum(range(150_000))
            apis.simple_note.show_note(note_id=note_id, access_token=token)
        except Exception as error:
            return str(error)
first = calls()
second = apis.simple_note.search_notes(access_token=token)
print(first.partition(":")[0], len(second) > 0)
"""
    )
    for _ in range(3):
        with environments.open(task) as episode:
            result = episode.step(code)
            assert not result.ended, result.text
            assert result.failure is None and "Exceeded" not in result.text, result.text
            assert episode.step("print(len(apis.simple_note.search_notes(access_token=token)) > 0)").text == "True\n"
