"""Episodes over AppWorld's own environment servers: real ones, and small ones that break the protocol."""

import http.server
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.appworld.http import pool as remote_pool
from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments
from gvpo_trl.environments.appworld.http.server import ServerLost, _beginning
from gvpo_trl.environments.appworld.http.verdicts import FAILED, verdict_of
from gvpo_trl.environments.checks import BUSY, ENDLESS, check_environment
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import (
    EnvironmentsExhausted,
    EpisodeFault,
    EvaluatorFault,
    HostFault,
    ProtocolFault,
    SetupError,
)
from tests.environments.http.http_servers import HttpServers, _free_ports
from tests.environments.support import solution, split_ids
from tests.environments.test_episodes import FIXED, LOGIN, TABLE

K = FailureKind


@pytest.fixture(scope="module")
def servers(pocket_root, appworld_venv):
    with HttpServers(pocket_root, 2, appworld_venv) as servers:
        yield servers


@pytest.fixture(scope="module")
def remote(servers, pocket_root):
    with RemoteEnvironments(servers.urls, root=pocket_root, step_timeout_s=4).start() as remote:
        yield remote


@pytest.fixture
def alone(servers):
    """One server, its tasks unknown here."""
    with RemoteEnvironments(servers.urls[:1]) as alone:
        yield alone


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(remote_pool, "BACK_OFF_S", 0.01)


# ---- real servers


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


def test_open_waits_while_all_servers_are_busy(remote, task):
    late = []
    with remote.open(task), ThreadPoolExecutor(1) as pool:
        with remote.open(task):
            waiting = pool.submit(lambda: late.append(remote.open(task)))
            time.sleep(0.3)
            assert not late
        waiting.result(timeout=30)
    late[0].close()


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


def test_code_that_runs_on_ends_the_episode_and_is_scored_elsewhere(servers, remote, pocket_root, task):
    with remote.open(task) as episode:
        assert episode.step(solution(pocket_root, task)).completed
        started = time.monotonic()
        result = episode.step(ENDLESS)
        assert (result.failure, result.ended) == (K.TIMEOUT, True)
        assert result.text == FAILED + "Exception: Execution timed out after 4 seconds."
        assert time.monotonic() - started < 4 + 2 + 1
        hanging = servers.urls.index(episode._world.place.server.url)
        assert episode.score().success
        assert episode._world.place.number != hanging
    with remote.open(task) as other:
        assert other._world.place.number != hanging
    servers.restart(hanging)
    assert_both_serve(remote, task)


def test_a_server_that_answers_after_all_is_used_again(servers, task):
    slow = "try:\n    " + BUSY.format(seconds=9).replace("\n", "\n    ") + "\nexcept Exception:\n    "
    slow += BUSY.format(seconds=2).replace("\n", "\n    ")
    with RemoteEnvironments(servers.urls[:1], step_timeout_s=1) as alone:
        with alone.open(task) as episode:
            assert episode.step(slow).ended
        with alone.open(task) as episode:
            assert episode.step("print(1)").text == "1\n"
            assert episode.score().failed


def assert_both_serve(remote, task):
    with ThreadPoolExecutor(2) as pool:
        episodes = list(pool.map(lambda _: remote.open(task), range(2)))
    assert {episode._world.place.number for episode in episodes} == {0, 1}
    for episode in episodes:
        assert episode.step("print(1)").text == "1\n"
        episode.score()
        episode.close()


def test_killed_servers(servers, remote, task, impatient):
    servers.kill(0)
    for _ in range(2):
        with remote.open(task) as episode:
            assert episode._world.place.number == 1, "the others go on"
            assert episode.score().failed
    with remote.open(task) as episode, ThreadPoolExecutor(1) as pool:
        running = pool.submit(episode.step, "while True: pass")
        time.sleep(0.3)
        servers.kill(1)
        with pytest.raises(HostFault, match="is gone"):
            running.result(timeout=20)
        with pytest.raises(EpisodeFault):
            episode.score()
    with pytest.raises(HostFault, match="no AppWorld server is alive; last cause: http://127"):
        remote.open(task)
    servers.restart(0, wait=False)
    servers.restart(1)
    servers.wait_ready(0)
    assert_both_serve(remote, task)


def test_closing_the_environment_ends_its_episodes(servers, task):
    env = RemoteEnvironments(servers.urls)
    first, _ = env.open(task), env.open(task)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(env.open, task)
        time.sleep(0.2)
        env.close()
        with pytest.raises(HostFault, match="closed"):
            waiting.result(timeout=10)
    env.close()
    with pytest.raises(EpisodeFault):
        first.step("print(1)")
    with pytest.raises(HostFault, match="closed"):
        env.open(task)
    server = first._world.place.server
    with pytest.raises(Exception, match="500"):
        server.ask("/task_completed", {"task_id": task}, timeout_s=5)


def test_a_server_keeps_one_folder_a_task(servers, remote, task):
    for _ in range(3):
        remote.open(task).close()
    folders = list(servers.outputs.glob(f"{remote._world_options.experiment}-*/tasks/{task}"))
    assert 1 <= len(folders) <= 2


def test_it_passes_the_conformance_test(remote, task):
    # Leaves a server that hangs: the last test with real ones.
    assert len(check_environment(remote, task)) == 11


# ---- servers that are none


class Broken:
    """An HTTP server whose answers are given; `script` maps a path to (status, body, promised length)."""

    def __init__(self, script):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = script.get(self.path, script.get("*"))
                if callable(answer):
                    return answer(self)
                status, body, *length = answer
                self.send_response(status)
                self.send_header("Content-Length", str(length[0] if length else len(body)))
                self.end_headers()
                self.wfile.write(body)
                return None

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.server.shutdown()
        self.server.server_close()


def answer(output):
    return 200, json.dumps({"output": output}).encode()


PROPER = {
    "/": (200, b'{"message": "Welcome to AppWorld Server!"}'),
    "/initialize": answer({"task_id": "t_1"}),
    "/execute": answer("Execution successful."),
    "/task_completed": answer(False),
    "/evaluate": answer({"passes": [{"requirement": "a"}], "failures": [], "num_tests": 2}),
    "/close": answer(None),
}


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def hang_up(handler):
    handler.close_connection = True


def speak_no_http(handler):
    handler.wfile.write(b"220 smtp ready\r\n")


GARBAGE = {
    "html": (200, b"<html>hello</html>"),
    "a list": (200, b"[1, 2]"),
    "no output": (200, b'{"message": "hello"}'),
    "a wrong type": answer(["text"]),
    "half a body": (200, b'{"output": "Exec', 1000),
    "not found": (404, b'{"detail": "Not Found"}'),
    "not utf-8": (200, b'{"output": "\xff"}'),
    "no http": speak_no_http,
}


def test_a_proper_answer_is_understood():
    with Broken(PROPER) as server, RemoteEnvironments([server.url]).start() as env, env.open("t_1") as episode:
        assert episode.step("print(1)").failure is None
        score = episode.score()
    assert (score.passed, score.failed, score.reward) == (("a",), ("a test that did not run",), 0.5)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_a_protocol_fault(name):
    for path in ("/initialize", "/execute", "/evaluate"):
        script = dict(PROPER)
        with Broken(script) as server, RemoteEnvironments([server.url]) as env:
            if path == "/initialize":
                script[path] = GARBAGE[name]
                with pytest.raises(ProtocolFault):
                    env.open("t_1")
                continue
            with env.open("t_1") as episode:
                script[path] = GARBAGE[name]
                with pytest.raises(ProtocolFault):
                    episode.step("print(1)") if path == "/execute" else episode.score()
                with pytest.raises(EpisodeFault):
                    episode.step("print(1)")


def test_a_body_that_does_not_end_meets_the_deadline():
    script = dict(PROPER)
    with Broken(script) as server, RemoteEnvironments([server.url], step_timeout_s=1, evaluate_timeout_s=1) as env:
        with env.open("t_1") as episode:
            script["/evaluate"] = drip
            with pytest.raises(EvaluatorFault, match="not answered within 1 s"):
                episode.score()
        script["/evaluate"], script["/execute"] = PROPER["/evaluate"], drip
        env._pool.places[0].clean = True
        with env.open("t_1") as episode:
            result = episode.step("print(1)")
            assert result.ended and 1 < result.seconds < 4
            with pytest.raises(EvaluatorFault, match="hangs, and its steps could not be played again"):
                episode.score()


@pytest.mark.parametrize("kind", [hang_up, (503, b"")])
def test_a_connection_without_answer_is_a_lost_server(kind):
    script = dict(PROPER)
    with Broken(script) as server, RemoteEnvironments([server.url]) as env, env.open("t_1") as episode:
        script["/execute"] = kind
        with pytest.raises(HostFault, match="is gone"):
            episode.step("print(1)")


def test_errors_of_the_server_by_what_was_asked():
    error = 500, b"Internal Server Error"
    script = PROPER | {"/tasks/t_1": (200, b'{"output": {}}')}
    with Broken(script) as server, RemoteEnvironments([server.url]) as env:
        with env.open("t_1") as episode:
            script["/task_completed"] = error
            assert not episode.step("print(1)").completed, "the agent broke its own world"
            script["/evaluate"] = error
            with pytest.raises(EvaluatorFault, match="500"):
                episode.score()
        script["/initialize"] = error
        with pytest.raises(EpisodeFault, match="knows the task: its disk may be full"):
            env.open("t_1")


def test_servers_that_never_come_back_exhaust_the_environment(impatient, monkeypatch):
    monkeypatch.setattr(remote_pool, "PROBE_AGAIN_S", 0.05)
    urls = [f"http://127.0.0.1:{port}" for port in _free_ports(2)]
    with RemoteEnvironments(urls, max_restarts=2, open_timeout_s=1) as env:
        with pytest.raises(HostFault, match="refused"):
            env.start()
        faults = []
        while True:
            try:
                env.open("t_1")
            except EnvironmentsExhausted as error:
                assert "last cause: http://127.0.0.1:" in str(error) and "refused" in str(error)
                break
            except HostFault as error:
                faults.append(error)
        assert 1 <= len(faults) <= 4
        assert all(place.failures > 2 for place in env._pool.places)


def test_start_tells_what_is_no_appworld_server():
    nginx = PROPER | {"/": (200, b'{"message": "nginx"}')}
    with Broken(nginx) as server, pytest.raises(SetupError, match="no AppWorld environment server"):
        RemoteEnvironments([server.url]).start()


def test_start_waits_for_a_server_that_is_still_starting():
    calls = []

    def late(handler):
        calls.append(1)
        handler.send_response(200 if len(calls) > 1 else 503)
        handler.end_headers()
        handler.wfile.write(b'{"message": "AppWorld"}')

    with Broken(PROPER | {"/": late}) as server, RemoteEnvironments([server.url]) as env:
        assert env.start() is env
    assert len(calls) == 2


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


@pytest.mark.parametrize("name", ["step_timeout_s", "open_timeout_s", "evaluate_timeout_s", "max_output_chars"])
def test_numbers_are_checked(name):
    with pytest.raises(SetupError, match=f"{name}=0"):
        RemoteEnvironments(["http://localhost:8001"], **{name: 0})


FRAME = FAILED + '  File "<python-input>", line 1, in <module>\n    '


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FRAME + "x\nValueError: a\n", K.RUNTIME),
        (FRAME + "x\nException: Response status code is 401:\n{}", K.API),
        (FRAME + "x\nException: Response status code is 401:", K.RUNTIME),
        (
            FRAME + "x\nException: Response status code is 401:\n{}\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "<python-input>", line 4, in <module>\nValueError: b',
            K.RUNTIME,
        ),
        (FRAME + "x\nException: Execution timed out after 3 seconds.", K.TIMEOUT),
        (FRAME + "x\nException: Execution timed out after 300 seconds.", K.RUNTIME),
        (FAILED + "Execution timed out after 3 seconds.", K.TIMEOUT),
        (FAILED, None),
        (FAILED + "anything", None),
        ("Execution successful.", None),
        ("  " + FRAME, None),
    ],
)
def test_the_verdict_of_a_text(text, kind):
    assert verdict_of("code", text, seconds=4.0) is kind
    assert verdict_of(" \n", text, seconds=4.0) is K.NO_CODE


def test_the_beginning_of_a_long_answer_is_read_at_every_cut():
    text = 'é\\"\n\x01😀a\\'
    data = json.dumps({"output": text}, ensure_ascii=False, separators=(",", ":")).encode()
    for length in range(len('{"output":"'), len(data)):
        beginning = _beginning(data[:length])
        assert text.startswith(beginning)
        assert len(data[:length]) - len(json.dumps(beginning, ensure_ascii=False).encode()) < len('{"output":') + 7
    assert _beginning(b"<html>") is None


def test_a_connection_refused_is_a_lost_server():
    env = RemoteEnvironments([f"http://127.0.0.1:{_free_ports(1)[0]}"])
    with pytest.raises(ServerLost, match="refused"):
        env._pool.places[0].server.ask("/", timeout_s=1)
