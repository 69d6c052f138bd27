"""Tests of an environment whose machinery dies, hangs or sends garbage."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import (
    EnvironmentsExhausted,
    EpisodeFault,
    EvaluatorFault,
    HostFault,
    ProtocolFault,
)
from tests.environments.support import children_of, every_pid, kill_host, split_ids, stat_of, wait_until


@pytest.fixture(scope="module")
def own(pocket_root, appworld_venv):
    """Episodes whose hosts this module may kill."""
    with AppWorldEnvironments(
        pocket_root, rehearse=False, venv=appworld_venv, max_episodes=4, step_timeout_s=30
    ) as environments:
        yield environments


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.fixture(scope="module")
def plain(pocket_root, appworld_venv):
    """Episodes whose agent code runs in the world's process."""
    options = {"rehearse": False, "venv": appworld_venv, "max_episodes": 4, "step_timeout_s": 30}
    with AppWorldEnvironments(pocket_root, isolation="process", **options) as environments:
        yield environments


def test_a_dead_host_is_a_fault_and_the_next_episode_has_a_new_one(own, task):
    with own.open(task) as first, own.open(task) as second:
        kill_host(own.machinery.worlds)
        with pytest.raises(HostFault, match="SIGKILL"):
            first.step("print(1)")
        with pytest.raises(HostFault):
            second.step("print(1)")
        with pytest.raises(EpisodeFault):
            first.step("print(1)")
    with own.open(task) as episode:
        assert episode.step("print(1)").failure is None
        assert episode.score().failed
    assert own.machinery.worlds.deaths == 0, "a scored episode forgives earlier deaths"


@pytest.mark.parametrize("keeper", ["worlds", "agents"])
def test_a_host_that_dies_in_a_step_takes_its_episodes_along(own, task, keeper):
    with own.open(task) as episode, ThreadPoolExecutor(1) as pool:
        pids = children_of(own)
        assert len(pids) == 2, "a world and an interpreter"
        running = pool.submit(episode.step, "while True: pass")
        time.sleep(0.3)
        kill_host(getattr(own.machinery, keeper))
        with pytest.raises(HostFault, match="SIGKILL"):
            running.result(timeout=20)
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)), "not only at the close"


def test_a_killed_episode_is_not_the_agents_fault(own, plain, task):
    for environments, victims in ((own, (0, 1)), (plain, (0,))):
        for victim in victims:
            with environments.open(task) as episode, ThreadPoolExecutor(1) as pool:
                pid = children_of(environments)[victim]
                running = pool.submit(episode.step, "while True: pass")
                time.sleep(0.3)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(EpisodeFault):
                    running.result(timeout=20)
                with environments.open(task) as other:
                    assert other.step("print(1)").failure is None


def test_a_world_that_hangs_holds_no_step_up_and_is_our_fault_in_the_end(pocket_root, appworld_venv, task):
    limits = {"step_timeout_s": 1, "open_timeout_s": 5}
    with (
        AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, **limits).start() as hasty,
        hasty.open(task) as episode,
    ):
        episode.step("print(1)")
        os.kill(children_of(hasty)[0], signal.SIGSTOP)
        started = time.monotonic()
        result = episode.step("print(1)")
        assert time.monotonic() - started < hasty.step_timeout_s + 2
        assert result.failure is FailureKind.TIMEOUT and result.ended
        with pytest.raises(EpisodeFault, match="could not be saved"):
            episode.score()


def test_an_interpreter_killed_between_steps_is_not_the_agents_fault(own, task):
    with own.open(task) as episode:
        episode.step("print(1)")
        os.kill(children_of(own)[1], signal.SIGKILL)
        with pytest.raises(EpisodeFault):
            episode.step("print(1)")


GARBAGE = """
write = __import__('ctypes').CDLL(None).write
for fd in range(3, 64):
    write(fd, b'\\xff\\xff\\xff\\xff garbage', 12)
"""


def test_garbage_on_the_channel_is_a_protocol_fault(plain, task):
    with plain.open(task) as episode:
        with pytest.raises(ProtocolFault):
            episode.step(GARBAGE)
        with pytest.raises(EpisodeFault):
            episode.step("print(1)")


def test_garbage_from_an_interpreter_is_the_agents_doing(own, task):
    with own.open(task) as episode:
        result = episode.step(GARBAGE)
        assert result.failure is FailureKind.FORBIDDEN and result.ended
        assert episode.score().failed


def test_an_evaluation_that_crashes_is_a_fault(own, task):
    with own.open(task) as episode:
        assert episode.score().failed
        (episode.output / "tasks" / task / "dbs" / "supervisor.jsonl").write_text("{broken")
        with pytest.raises(EvaluatorFault, match="JSON"):
            episode.score()


def test_an_evaluation_that_hangs_is_a_fault_and_a_second_try_works(pocket_root, appworld_venv, task):
    options = {"rehearse": False, "venv": appworld_venv, "evaluate_timeout_s": 3}
    with AppWorldEnvironments(pocket_root, **options) as hasty:
        with hasty.open(task) as episode:
            episode.score()
        host = hasty.machinery.worlds.host.process.pid
        (evaluator,) = (pid for pid in every_pid() if stat_of(pid)[1] == host)
        with hasty.open(task) as episode:
            os.kill(evaluator, signal.SIGSTOP)
            with pytest.raises(EvaluatorFault, match="in time"):
                episode.score()
            assert episode.score().failed, "the state is still there"


def test_an_evaluator_evaluates_again_and_one_that_died_meanwhile_is_replaced(own, plain, task):
    for environments in (own, plain):
        evaluators, results = environments.machinery.evaluators, []
        for kill in (False, False, True):
            with environments.open(task) as episode:
                episode.step("print(1)")
                waiting = evaluators.idle
                if kill:
                    waiting[-1].host.reap(waiting[-1].number)
                results.append(episode.score().failed)
                assert (evaluators.idle == waiting) == (len(results) == 2)
        assert results[0] and results[0] == results[1] == results[2]


def test_a_host_that_dies_before_the_evaluation_is_replaced(own, task):
    with own.open(task) as episode:
        episode.step("print(1)")
        kill_host(own.machinery.worlds)
        with pytest.raises(HostFault):
            episode.score()


def test_hosts_that_die_again_and_again_exhaust_the_environment(pocket_root, appworld_venv, task, monkeypatch):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_restarts=1)
    with environments:
        monkeypatch.setitem(environments.machinery.worlds.launch.config, "warm_up_task", "no-such-task")
        for _ in range(2):
            with pytest.raises(HostFault, match="could not warm up"):
                environments.open(task)
        with pytest.raises(EnvironmentsExhausted, match="no-such-task"):
            environments.open(task)


def test_hosts_do_not_grow_with_their_episodes(own, task):
    """AppWorld leaks about a megabyte per world in a process that is used again."""

    def play(times):
        for _ in range(times):
            with own.open(task) as episode:
                episode.step("print(apis.supervisor.show_profile())")
                episode.score()

    def resident_kb():
        pids = [keeper.host.process.pid for keeper in own.machinery.keepers]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in status)

    play(2)
    before = resident_kb()
    play(8)
    assert resident_kb() - before < 4_000


def test_a_host_that_cannot_be_started_is_a_fault_and_exhausts_in_the_end(pocket_root, appworld_venv, task):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_restarts=1)
    with environments:
        descriptors = len(os.listdir("/proc/self/fd"))
        workspace = environments.machinery.workspace.path
        workspace.rename(moved := workspace.with_name("moved"))
        try:
            for _ in range(2):
                with pytest.raises(HostFault, match=r"cannot be started: .*No such file"):
                    environments.open(task)
            with pytest.raises(EnvironmentsExhausted, match="No such file"):
                environments.open(task)
            assert len(os.listdir("/proc/self/fd")) == descriptors
        finally:
            moved.rename(workspace)
