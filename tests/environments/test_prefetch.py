"""Tests of worlds that are opened in advance: they are handed out, make room, and end when nobody wants them."""

import threading

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.faults import SetupError
from tests.environments.support import children_of, processes_below, split_ids, wait_until


@pytest.fixture(scope="module")
def own(pocket_root, appworld_venv):
    with AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_episodes=3) as environments:
        yield environments.start()


@pytest.fixture
def tasks(pocket_root):
    return split_ids(pocket_root)[:4]


@pytest.fixture(autouse=True)
def nothing_left(own):
    yield
    own.prefetch([])
    assert wait_until(lambda: not any(thread.name == "prefetch" for thread in threading.enumerate()))
    assert own.prefetched == () and children_of(own) == []


def ready(own):
    return sorted(episode.task_id for episode in own.prefetched)


def test_a_prefetched_world_is_handed_out_at_once_and_is_like_any_other(own, tasks):
    with own.open(tasks[0]) as plain:
        expected = plain.step("print(apis.supervisor.show_profile())").text
    own.prefetch([tasks[0], tasks[0], tasks[1]])
    assert wait_until(lambda: len(own.prefetched) == 3)
    prefetched = list(own.prefetched)
    with own.open(tasks[0]) as first, own.open(tasks[0]) as second:
        assert first in prefetched and second in prefetched and first is not second
        assert first.reset.task_id == tasks[0]
        first.step("mine = 1")
        assert second.step("print('mine' in globals())").text == "False\n"
        assert second.step("print(apis.supervisor.show_profile())").text == expected
        assert first.score().failed


def test_worlds_that_nobody_asks_for_make_room(own, tasks):
    own.prefetch(tasks[:3])
    assert wait_until(lambda: len(own.prefetched) == 3)
    with own.open(tasks[3]) as other:
        assert other.step("print(1)").failure is None
        assert len(own.prefetched) == 2 and len(children_of(own)) == 2 * 3


def test_places_that_are_taken_are_prefetched_into_when_they_are_free(own, tasks):
    episodes = [own.open(tasks[0]) for _ in range(3)]
    own.prefetch(tasks[1:3])
    assert ready(own) == []
    episodes.pop().close()
    assert wait_until(lambda: len(own.prefetched) == 1)
    for episode in episodes:
        episode.close()
    assert wait_until(lambda: ready(own) == sorted(tasks[1:3]))


def test_a_later_call_replaces_an_earlier_one(own, tasks):
    own.prefetch(tasks[:3])
    assert wait_until(lambda: len(own.prefetched) == 3)
    kept = next(episode for episode in own.prefetched if episode.task_id == tasks[1])
    own.prefetch([tasks[1], tasks[3]])
    assert wait_until(lambda: ready(own) == sorted([tasks[1], tasks[3]]))
    assert kept in own.prefetched


def test_a_world_whose_host_died_is_not_handed_out(own, tasks):
    own.prefetch(tasks[:1])
    assert wait_until(lambda: len(own.prefetched) == 1)
    (stale,) = own.prefetched
    own.machinery.worlds.host.close()
    with own.open(tasks[0]) as episode:
        assert episode is not stale and episode.step("print(1)").failure is None


def test_unknown_tasks_are_an_error(own, tasks):
    with pytest.raises(SetupError, match=tasks[0]):
        own.prefetch([tasks[0] + "0"])


def test_closing_ends_what_was_prefetched(pocket_root, appworld_venv, tasks):
    environments = AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_episodes=3)
    environments.prefetch(tasks[:3])
    assert wait_until(lambda: environments.prefetched, timeout_s=60)
    workspace = environments.machinery.workspace.path
    environments.close()
    assert wait_until(lambda: not processes_below(str(workspace)))
    assert wait_until(lambda: not any(thread.name == "prefetch" for thread in threading.enumerate()))
    assert not workspace.exists()
