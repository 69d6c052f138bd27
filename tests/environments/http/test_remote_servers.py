"""Answers that no AppWorld server gives, and answers that do not come."""

import json

import pytest

from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments
from gvpo_trl.environments.appworld.http.server import Server, ServerLost, text_beginning
from gvpo_trl.faults import EpisodeFault, EvaluatorFault, HostFault, ProtocolFault
from tests.environments.http.broken_servers import PROPER, BrokenServer, answer, drip, hang_up, speak_no_http
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
