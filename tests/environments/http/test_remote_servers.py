"""Tests of answers that no AppWorld server gives, and of answers that never come."""

import json

import pytest

from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments
from gvpo_trl.environments.appworld.http.pool import State
from gvpo_trl.environments.appworld.http.server import Server, ServerGarbage, ServerLost, ServerSilent, text_beginning
from gvpo_trl.faults import EpisodeFault, EvaluatorFault, HostFault, ProtocolFault
from tests.environments.http.broken_servers import PROPER, BrokenServer, answer, drip, hang_up, raw, speak_no_http
from tests.environments.http.http_servers import free_ports

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
    with BrokenServer(PROPER) as server, RemoteEnvironments([server.url]).start() as env, env.open("t_1") as episode:
        assert episode.step("print(1)").failure is None
        score = episode.score()
    assert (score.passed, score.failed, score.reward) == (("a",), ("a test that did not run",), 0.5)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_a_protocol_fault(name):
    for path in ("/initialize", "/execute", "/evaluate"):
        script = dict(PROPER)
        with BrokenServer(script) as server, RemoteEnvironments([server.url]) as env:
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
    with (
        BrokenServer(script) as server,
        RemoteEnvironments([server.url], step_timeout_s=1, evaluate_timeout_s=1) as env,
    ):
        with env.open("t_1") as episode:
            script["/evaluate"] = drip
            with pytest.raises(EvaluatorFault, match="not answered within 1 s"):
                episode.score()
        script["/evaluate"], script["/execute"] = PROPER["/evaluate"], drip
        env.pool.entries[0].clean = True
        with env.open("t_1") as episode:
            assert episode.step("print(1)").ended
            with pytest.raises(EvaluatorFault, match="hangs, and its steps could not be repeated"):
                episode.score()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "status": (b"HTTP/1.1 ", b"2"),
    "header": (b"HTTP/1.1 200 OK\r\nX-Header: ", b"x"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Header: x\r\n"),
    "interim responses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk size": (CHUNKED, b"0"),
    "chunk": (CHUNKED + b"ffff\r\n", b"x"),
    "trailer": (CHUNKED + b"0\r\n", b"X-Trailer: x\r\n"),
}


@pytest.mark.parametrize("name", DRIPS)
def test_one_deadline_holds_for_a_whole_answer_whatever_part_of_it_drips(name):
    with BrokenServer({"*": raw(*DRIPS[name])}) as server, pytest.raises(ServerSilent, match=r"within 0\.5 s"):
        Server(server.url).ask("/evaluate", {}, timeout_s=0.5)


@pytest.mark.parametrize("name", ["interim responses", "trailer"])
def test_an_answer_without_an_end_is_given_up_before_its_deadline(name):
    beginning, piece = DRIPS[name]
    script = {"*": raw(beginning, piece * 1000, times=3000, pause_s=0)}
    with BrokenServer(script) as server, pytest.raises(ServerGarbage, match="too long"):
        Server(server.url).ask("/evaluate", {}, timeout_s=60)


def test_an_answer_of_very_many_values_is_not_parsed():
    body = b'{"output": [' + b"{}, " * 1_100_000 + b"{}]}"
    with BrokenServer({"*": (200, body)}) as server, pytest.raises(ServerGarbage, match="1000000 values"):
        Server(server.url).ask("/evaluate", {}, timeout_s=60)


def test_an_answer_to_a_step_that_is_more_than_a_text_is_not_parsed():
    nest = b'{"output": "x", "more": [' + b"{}, " * 100_000 + b"{}]}"
    with BrokenServer({"*": (200, nest)}) as server, pytest.raises(ServerGarbage, match="more than 1000 values"):
        Server(server.url).execute("t_1", "1", timeout_s=60, max_chars=1_000_000)


def test_a_text_full_of_the_signs_of_json_is_taken():
    text = '[{"a": 1}, ' * 10_000 + "\\"
    with BrokenServer({"*": answer(text)}) as server:
        assert Server(server.url).execute("t_1", "1", timeout_s=60, max_chars=1_000_000) == (text, True)


ONE = [{"requirement": "a"}]
REPORTS = {
    "endless": b'{"output": {"passes": [], "failures": [], "num_tests": Infinity}}',
    "not a number": b'{"output": {"passes": [], "failures": [], "num_tests": NaN}}',
    "huge": {"passes": ONE, "failures": [], "num_tests": 200_000_000},
    "negative": {"passes": [], "failures": [], "num_tests": -1},
    "a fraction": {"passes": ONE, "failures": [], "num_tests": 1.5},
    "a float": {"passes": ONE, "failures": [], "num_tests": 1.0},
    "a bool": {"passes": ONE, "failures": [], "num_tests": True},
    "a text": {"passes": ONE, "failures": [], "num_tests": "1"},
    "none": {"passes": ONE, "failures": []},
    "fewer than results": {"passes": ONE, "failures": ONE, "num_tests": 1},
    "passes are a text": {"passes": "abc", "failures": [], "num_tests": 3},
    "passes are an object": {"passes": {"requirement": "a"}, "failures": [], "num_tests": 1},
    "a test is a number": {"passes": [1], "failures": [], "num_tests": 1},
    "a test without requirement": {"passes": [], "failures": [{}], "num_tests": 1},
    "a requirement that is no text": {"passes": [{"requirement": 1}], "failures": [], "num_tests": 1},
    "very many tests": {"passes": ONE * 10_001, "failures": [], "num_tests": 10_001},
    "no object": ["passes", "failures", "num_tests"],
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_that_is_none_is_a_protocol_fault_and_its_server_is_left_alone(name):
    report = REPORTS[name]
    script = PROPER | {"/evaluate": (200, report) if isinstance(report, bytes) else answer(report)}
    with BrokenServer(script) as server, RemoteEnvironments([server.url]) as env:
        with env.open("t_1") as episode, pytest.raises(ProtocolFault, match="gave no test results"):
            episode.score()
        assert [entry.state for entry in env.pool.entries] == [State.DOWN]


def test_what_servers_do_not_protect_is_said_once(caplog):
    with BrokenServer(PROPER) as server, RemoteEnvironments([server.url]) as env:
        for _ in range(2):
            env.start()
            env.open("t_1").close()
    assert caplog.text.count("can change how the later episodes of its server run and are scored") == 1


@pytest.mark.parametrize("kind", [hang_up, (503, b"")])
def test_a_connection_without_answer_is_a_lost_server(kind):
    script = dict(PROPER)
    with BrokenServer(script) as server, RemoteEnvironments([server.url]) as env, env.open("t_1") as episode:
        script["/execute"] = kind
        with pytest.raises(HostFault, match="is gone"):
            episode.step("print(1)")


def test_errors_of_the_server_by_what_was_asked():
    error = 500, b"Internal Server Error"
    script = PROPER | {"/tasks/t_1": (200, b'{"output": {}}')}
    with BrokenServer(script) as server, RemoteEnvironments([server.url]) as env:
        with env.open("t_1") as episode:
            script["/task_completed"] = error
            assert not episode.step("print(1)").completed, "the agent broke its own world"
            script["/evaluate"] = error
            with pytest.raises(EvaluatorFault, match="500"):
                episode.score()
        script["/initialize"] = error
        with pytest.raises(EpisodeFault, match="knows the task: its disk may be full"):
            env.open("t_1")


def test_the_beginning_of_a_long_answer_is_read_at_every_cut():
    text = 'é\\"\n\x01😀a\\'
    data = json.dumps({"output": text}, ensure_ascii=False, separators=(",", ":")).encode()
    for length in range(len('{"output":"'), len(data)):
        beginning = text_beginning(data[:length])
        assert text.startswith(beginning)
        assert len(data[:length]) - len(json.dumps(beginning, ensure_ascii=False).encode()) < len('{"output":') + 7
    assert text_beginning(b"<html>") is None


def test_a_connection_refused_is_a_lost_server():
    with pytest.raises(ServerLost, match="refused"):
        Server(f"http://127.0.0.1:{free_ports(1)[0]}").ask("/", timeout_s=1)
