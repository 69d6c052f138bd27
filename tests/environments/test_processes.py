"""What happens when the machinery dies, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.workspace import PREFIX, Workspace
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import (
    EnvironmentsExhausted,
    EpisodeFault,
    EvaluatorFault,
    HostFault,
    ProtocolFault,
    SetupError,
)
from tests.environments.support import processes_below, split_ids, wait_until

ROOT = Path(__file__).resolve().parents[2]


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


def kill_host(keeper):
    process = keeper._host.process
    process.kill()
    process.wait()


def test_a_dead_host_is_a_fault_and_the_next_episode_has_a_new_one(own, task):
    with own.open(task) as first, own.open(task) as second:
        kill_host(own._hosts)
        with pytest.raises(HostFault, match="SIGKILL"):
            first.step("print(1)")
        with pytest.raises(HostFault):
            second.step("print(1)")
        with pytest.raises(EpisodeFault):
            first.step("print(1)")
    with own.open(task) as episode:
        assert episode.step("print(1)").failure is None
        assert episode.score().failed
    assert own._hosts._deaths == 0, "a scored episode forgives earlier deaths"


@pytest.mark.parametrize("keeper", ["_hosts", "_agents"])
def test_a_host_that_dies_in_a_step_takes_its_episodes_along(own, task, keeper):
    with own.open(task) as episode, ThreadPoolExecutor(1) as pool:
        pids = children_of(own)
        assert len(pids) == 2, "a world and an interpreter"
        running = pool.submit(episode.step, "while True: pass")
        time.sleep(0.3)
        kill_host(getattr(own, keeper))
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


def test_a_world_that_hangs_holds_no_step_up_and_is_our_fault_in_the_end(own, task, monkeypatch):
    monkeypatch.setattr(own, "step_timeout_s", 1.0)
    monkeypatch.setattr(own, "open_timeout_s", 3.0)
    with own.open(task) as episode:
        episode.step("print(1)")
        os.kill(children_of(own)[0], signal.SIGSTOP)
        started = time.monotonic()
        result = episode.step("print(1)")
        assert time.monotonic() - started < own.step_timeout_s + 2
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


def test_an_evaluation_that_crashes_or_hangs_is_a_fault(own, task, monkeypatch):
    with own.open(task) as episode:
        monkeypatch.setattr(own, "evaluate_timeout_s", 0.001)
        with pytest.raises(EvaluatorFault, match="in time"):
            episode.score()
        monkeypatch.undo()
        assert episode.score().failed, "a second try works: the state is still there"
        output = own._workspace.outputs / episode._names["experiment"] / "tasks" / task
        (output / "dbs" / "supervisor.jsonl").write_text("{broken")
        with pytest.raises(EvaluatorFault, match="JSON"):
            episode.score()


def test_an_evaluator_evaluates_again_and_one_that_died_meanwhile_is_replaced(own, plain, task):
    for environments in (own, plain):
        results = []
        for kill in (False, False, True):
            with environments.open(task) as episode:
                episode.step("print(1)")
                waiting = list(environments._idle_evaluators)
                if kill:
                    waiting[-1].host.reap(waiting[-1].id)
                results.append(episode.score().failed)
        assert results[0] and results[0] == results[1] == results[2]
        assert environments._idle_evaluators != waiting


def test_a_host_that_dies_before_the_evaluation_is_replaced(own, task):
    with own.open(task) as episode:
        episode.step("print(1)")
        kill_host(own._hosts)
        with pytest.raises(HostFault):
            episode.score()


def test_hosts_that_die_again_and_again_exhaust_the_environment(pocket_root, appworld_venv, task, monkeypatch):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_restarts=1)
    with environments:
        monkeypatch.setitem(environments._hosts.launch.config, "warm_up_task", "no-such-task")
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
        pids = [keeper._host.process.pid for keeper in own._keepers]
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
        environments._workspace.path.rename(moved := environments._workspace.path.with_name("moved"))
        try:
            for _ in range(2):
                with pytest.raises(HostFault, match=r"cannot be started: .*No such file"):
                    environments.open(task)
            with pytest.raises(EnvironmentsExhausted, match="No such file"):
                environments.open(task)
            assert len(os.listdir("/proc/self/fd")) == descriptors
        finally:
            moved.rename(environments._workspace.path)


def test_grandchildren_go_with_their_episode(plain, task):
    code = """
os = __import__('posix')
def grandchild(leave):
    if os.fork() == 0:
        if leave:
            os.setsid()
        while True:
            pass
grandchild(False)
grandchild(True)
print(os.getpid())
"""
    with plain.open(task) as episode:
        result = episode.step(code)
        assert result.failure is None, result.text
        session = int(result.text)
        assert any(stat_of(pid)[2] == session for pid in every_pid())
    children_of(plain)
    host = plain._hosts._host.process.pid
    assert wait_until(lambda: not any(stat_of(pid)[1] == host or stat_of(pid)[2] == session for pid in every_pid()))


def children_of(environments):
    """Pids of the processes that the environments' hosts forked, worlds first; waiting evaluators end."""
    while environments._idle_evaluators:
        environments._idle_evaluators.pop().end()
    hosts = [keeper._host.process.pid for keeper in environments._keepers]
    return [pid for host in hosts for pid in every_pid() if stat_of(pid)[1] == host]


def every_pid():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def stat_of(pid):
    """State, parent and session of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ("", 0, 0)
    return fields[0], int(fields[1]), int(fields[3])


TRAINER = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born with it ignored
from gvpo_trl.environments.appworld import AppWorldEnvironments

environments = AppWorldEnvironments({root!r}, rehearse=False, venv={venv!r}, output_dir={out!r}, step_timeout_s=60)
other = environments.open({task!r})
other.step("print(1)")
episode = environments.open({task!r})
threading.Thread(target=lambda: episode.step("while True: pass"), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("signum", "then"),
    [
        (signal.SIGKILL, "time.sleep(600)"),
        (signal.SIGINT, "time.sleep(600)"),
        (None, "sys.exit(0)"),
        (None, "raise ValueError"),
    ],
)
def test_a_trainer_that_ends_leaves_nothing(pocket_root, appworld_venv, task, tmp_path, signum, then):
    values = {"root": str(pocket_root), "venv": str(appworld_venv), "out": str(tmp_path), "task": task, "then": then}
    script = textwrap.dedent(TRAINER).format(**values)
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert trainer.stdout.readline() == "ready\n"
        if signum is not None:
            assert len(processes_below(str(tmp_path))) == 7, "trainer, two hosts, two worlds, two interpreters"
            trainer.send_signal(signum)
        trainer.wait(timeout=60)
    finally:
        trainer.kill()
        trainer.communicate()
    assert wait_until(lambda: not processes_below(str(tmp_path))), processes_below(str(tmp_path))
    if signum is signal.SIGKILL:
        assert list(tmp_path.iterdir()), "nobody was there to tidy up"
        Workspace(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_only_workspaces_without_an_owner_are_cleaned(tmp_path):
    alive = Workspace(tmp_path)
    stale = tmp_path / f"{PREFIX}stale"
    stale.mkdir()
    (stale / "owner").touch()
    unrelated = tmp_path / f"{PREFIX}unrelated"
    unrelated.mkdir()
    second = Workspace(tmp_path)
    assert alive.path.exists() and second.path.exists() and unrelated.exists() and not stale.exists()
    alive.remove()
    alive.remove()
    second.remove()


def test_close_is_idempotent_and_wakes_those_who_wait(pocket_root, appworld_venv, task):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_episodes=1)
    episode = environments.open(task)
    caught = []

    def wait():
        try:
            environments.open(task)
        except HostFault as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    workspace = environments._workspace.path
    environments.close()
    environments.close()
    waiter.join(30)
    assert len(caught) == 1
    with pytest.raises(HostFault):
        environments.open(task)
    with pytest.raises(HostFault):
        episode.step("print(1)")
    episode.close()
    assert not workspace.exists() and not processes_below(str(workspace))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_episodes": 0}, "max_episodes=0 must be"),
        ({"step_timeout_s": 0.5}, "step_timeout_s=0.5 must be"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s=nan must be"),
        ({"max_interactions": None}, "max_interactions=None must be"),
        ({"venv": "/nowhere"}, "gvpo-trl appworld setup"),
        ({"isolation": "docker"}, "isolation='docker' must be one of 'split', 'process'"),
        ({"isolation": "process", "require_sandbox": True}, "require_sandbox=True needs isolation='split'"),
        ({"urls": ["http://127.0.0.1:9"]}, "venv: of no effect on the servers of urls"),
        ({"output_dir": "/proc/nowhere"}, "output_dir='/proc/nowhere' cannot be written"),
        ({"output_dir": "/tmp/memory"}, "'memory'"),
        ({"root": "/nowhere"}, "gvpo-trl appworld pocket --root DIR"),
    ],
)
def test_mistakes_are_told_before_anything_starts(pocket_root, appworld_venv, values, message):
    with pytest.raises(SetupError, match=message) as raised:
        AppWorldEnvironments(**({"root": pocket_root, "venv": appworld_venv} | values))
    assert len(str(raised.value).splitlines()) <= 2


def test_open_from_a_thread_that_ends_keeps_the_host(own, task):
    """The kernel's death signal counts threads as parents: a host must outlive the thread that started it."""
    environments = AppWorldEnvironments(own.root, rehearse=False, venv=own._hosts.launch.python.parents[1])
    opened = []
    thread = threading.Thread(target=lambda: opened.append(environments.open(task)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with environments, opened[0] as episode:
        assert episode.step("print(1)").failure is None
        assert episode.step("raise Exception").failure is FailureKind.RUNTIME


@pytest.mark.parametrize("support", ["none", "partial"])
def test_a_kernel_that_offers_too_little_is_said_or_refused(own, task, caplog, monkeypatch, support):
    facts = {"level": support, "missing": ["no Landlock: allow its system calls"], "ready": True}
    options = {"rehearse": False, "venv": own._hosts.launch.python.parents[1]}
    refused = pytest.raises(SetupError, match=f"level here is '{support}': no Landlock: allow its system calls")
    with AppWorldEnvironments(own.root, require_sandbox=True, **options) as strict, refused:
        strict._tell(facts)
    with AppWorldEnvironments(own.root, **options) as lenient:
        lenient._tell(facts)
        lenient._tell(facts)
        lenient._check_restriction({"leaks": ["read the planted file"]})
        assert caplog.text.count("AGENT CODE IS NOT FULLY SANDBOXED") == 1 and support in lenient.protection
