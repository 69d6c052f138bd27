"""Tests of servers that are busy, hang, die, come back or never start."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.appworld.http import pool as remote_pool
from gvpo_trl.environments.appworld.http.environments import RemoteEnvironments
from gvpo_trl.environments.appworld.http.verdicts import FAILED
from gvpo_trl.environments.checks import BUSY, ENDLESS
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentsExhausted, EpisodeFault, HostFault, SetupError
from tests.environments.http.broken_servers import PROPER, BrokenServer
from tests.environments.http.http_servers import free_ports
from tests.environments.support import solution

K = FailureKind


def test_open_waits_while_all_servers_are_busy(remote, task):
    late = []
    with remote.open(task), ThreadPoolExecutor(1) as pool:
        with remote.open(task):
            waiting = pool.submit(lambda: late.append(remote.open(task)))
            time.sleep(0.3)
            assert not late
        waiting.result(timeout=30)
    late[0].close()


def test_code_that_runs_on_ends_the_episode_and_is_scored_elsewhere(servers, remote, pocket_root, task):
    with remote.open(task) as episode:
        assert episode.step(solution(pocket_root, task)).completed
        started = time.monotonic()
        result = episode.step(ENDLESS)
        assert (result.failure, result.ended) == (K.TIMEOUT, True)
        assert result.text == FAILED + "Exception: Execution timed out after 4 seconds."
        assert time.monotonic() - started < 4 + 2 + 1
        hanging = servers.urls.index(episode.world.entry.server.url)
        assert episode.score().success
        assert episode.world.entry.number != hanging
    with remote.open(task) as other:
        assert other.world.entry.number != hanging
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
    assert {episode.world.entry.number for episode in episodes} == {0, 1}
    for episode in episodes:
        assert episode.step("print(1)").text == "1\n"
        episode.score()
        episode.close()


def test_killed_servers(servers, remote, task, impatient):
    servers.kill(0)
    for _ in range(2):
        with remote.open(task) as episode:
            assert episode.world.entry.number == 1, "the others go on"
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
    server = first.world.entry.server
    with pytest.raises(Exception, match="500"):
        server.ask("/task_completed", {"task_id": task}, timeout_s=5)


def test_servers_that_never_come_back_exhaust_the_environment(impatient, monkeypatch):
    monkeypatch.setattr(remote_pool, "PROBE_AGAIN_S", 0.05)
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
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
        assert all(entry.failures > 2 for entry in env.pool.entries)


def test_start_tells_what_is_no_appworld_server():
    nginx = PROPER | {"/": (200, b'{"message": "nginx"}')}
    with BrokenServer(nginx) as server, pytest.raises(SetupError, match="no AppWorld environment server"):
        RemoteEnvironments([server.url]).start()


def test_start_waits_for_a_server_that_is_still_starting():
    calls = []

    def late(handler):
        calls.append(1)
        handler.send_response(200 if len(calls) > 1 else 503)
        handler.end_headers()
        handler.wfile.write(b'{"message": "AppWorld"}')

    with BrokenServer(PROPER | {"/": late}) as server, RemoteEnvironments([server.url]) as env:
        assert env.start() is env
    assert len(calls) == 2
