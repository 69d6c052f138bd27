"""The places for open episodes, with toy episodes: never too many, nobody waits for ever, nothing stays open."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.appworld.prefetch import Places
from gvpo_trl.faults import EpisodeFault, HostFault
from tests.environments.support import wait_until

COUNT = 3


class Toys:
    """Opens toy episodes and counts the ones that are open."""

    def __init__(self, failing=0.0):
        self.lock, self.dice = threading.Lock(), random.Random(0)
        self.failing, self.open, self.most, self.opened = failing, 0, 0, 0

    def __call__(self, task_id, on_close):
        with self.lock:
            self.open, self.opened = self.open + 1, self.opened + 1
            self.most = max(self.most, self.open)
            fails = self.dice.random() < self.failing
        time.sleep(0.001)
        if fails:
            with self.lock:
                self.open -= 1
            raise EpisodeFault("the toy is broken")
        return Toy(self, task_id, on_close)


class Toy:
    lost = False

    def __init__(self, toys, task_id, on_close):
        self.toys, self.task_id, self.on_close = toys, task_id, on_close

    def close(self):
        with self.toys.lock:
            self.toys.open -= 1
        self.on_close()


@pytest.mark.parametrize("failing", [0.0, 0.3])
def test_there_are_never_more_open_episodes_than_places(failing):
    toys = Toys(failing)
    places = Places(COUNT, toys)

    def run(seed):
        dice, got = random.Random(seed), 0
        for _ in range(60):
            if dice.random() < 0.3:
                places.prefetch(dice.choices("abc", k=dice.randrange(5)))
            task_id = dice.choice("abcd")
            try:
                episode = places.take(task_id)
            except EpisodeFault:
                continue
            assert episode.task_id == task_id
            got += 1
            episode.close()
        return got

    with ThreadPoolExecutor(8) as pool:
        got = sum(pool.map(run, range(8)))
    assert toys.most <= COUNT
    assert got == 8 * 60 if not failing else 0 < got < 8 * 60
    places.prefetch([])
    assert wait_until(lambda: not places.busy and places.taken == 0)
    assert places.ready == () and toys.open == 0


def test_an_episode_that_nobody_wants_any_more_when_it_is_open_is_closed():
    toys, opening, go_on = Toys(), threading.Event(), threading.Event()

    def open_slowly(task_id, on_close):
        opening.set()
        assert go_on.wait(20)
        return toys(task_id, on_close)

    places = Places(1, open_slowly)
    places.prefetch(["a"])
    assert opening.wait(20)
    places.prefetch([])
    go_on.set()
    assert wait_until(lambda: not places.busy and places.taken == 0)
    assert places.ready == () and toys.opened == 1


def test_an_episode_that_is_being_opened_is_not_opened_twice():
    toys, go_on = Toys(), threading.Event()

    def open_slowly(task_id, on_close):
        assert go_on.wait(20)
        return toys(task_id, on_close)

    places = Places(COUNT, open_slowly)
    for _ in range(3):
        places.prefetch(["a"])
    go_on.set()
    assert wait_until(lambda: not places.busy)
    assert [episode.task_id for episode in places.ready] == ["a"] and toys.opened == 1


def test_room_that_callers_leave_is_used():
    places = Places(2, Toys())
    first, second = places.take("c"), places.take("c")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(places.take, "c")
        places.prefetch(["b"])
        first.close()
        second.close()
        waiting.result(timeout=20)
    assert wait_until(lambda: [episode.task_id for episode in places.ready] == ["b"])


def test_episodes_that_are_lost_are_not_handed_out():
    toys = Toys()
    places = Places(COUNT, toys)
    places.prefetch(["a"])
    assert wait_until(lambda: places.ready)
    (lost,) = places.ready
    lost.lost = True
    assert places.take("a") is not lost
    places.prefetch(["a"])
    assert wait_until(lambda: not places.busy and places.ready)
    assert lost not in places.ready


def test_closing_refuses_those_who_wait_and_those_who_come():
    toys = Toys()
    places = Places(1, toys)
    episode = places.take("a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(places.take, "b")
        places.prefetch(["a"])
        places.close()
        with pytest.raises(HostFault, match="closed"):
            waiting.result(timeout=20)
    with pytest.raises(HostFault, match="closed"):
        places.take("a")
    episode.close()
    assert wait_until(lambda: not places.busy)
    assert toys.open == 0 and toys.opened == 1
