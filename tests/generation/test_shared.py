"""Several processes, here threads, share one generator. Each has its own number of rows and gets its own turns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.generation.sharing import SharedTurns
from gvpo_trl.rollout.types import StopReason, Turn
from tests.support.rolling import DONE, GENEROUS_S, TOKENIZER, block, roll
from tests.support.streaming import Stepped, Threaded
from tests.support.toy import ToyEnvironment


class Meeting:
    """A collective call of threads, which returns the messages of all ranks to each rank."""

    def __init__(self, size):
        self.size, self.barrier, self.brought = size, threading.Barrier(size), {}

    def of(self, rank):
        def exchange(message):
            self.brought[rank] = message
            self.barrier.wait(GENEROUS_S)
            messages = [self.brought[other] for other in range(self.size)]
            self.barrier.wait(GENEROUS_S)
            return messages

        return exchange


class Replying:
    """A batch generator whose turns depend only on the prompt: `x = <length>` until the prompt is long, then done."""

    def __init__(self):
        self.calls = []

    def __call__(self, requests):
        self.calls.append([request.trajectory for request in requests])
        turns = []
        for request in requests:
            text = DONE if len(request.ids) > 250 else block(f"x = {len(request.ids)}")
            ids = TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
            turns.append(Turn(ids=ids[: request.max_new_tokens]))
        return turns


def run_ranks(rows, source_of, everywhere=False, fail=lambda rank: None):
    """Return what `roll` returns or raises on each rank."""
    meeting = Meeting(len(rows))

    def run(rank):
        shared = SharedTurns(meeting.of(rank), rank, len(rows), source_of(rank), everywhere)
        with shared:
            if not rows[rank]:
                return []
            environment = ToyEnvironment(faults=lambda episode, place: fail(rank))
            return roll([None] * rows[rank], environment, shared)

    with ThreadPoolExecutor(len(rows)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(rows))]
        return [future.exception(GENEROUS_S) or future.result() for future in futures]


def summary(trajectories):
    return [(t.task_id, t.stop, t.reward, [step.action_ids for step in t.steps]) for t in trajectories]


@pytest.mark.parametrize("rows", [[3, 1], [0, 2, 5], [2, 0]])
def test_a_server_of_rank_0_serves_ranks_with_different_numbers_of_rows(rows):
    source = Threaded(Replying())
    results = run_ranks(rows, lambda rank: source if rank == 0 else None)
    alone = summary(roll([None] * max(rows), generate=Replying()))
    assert [summary(result) for result in results] == [alone[:count] for count in rows]


def test_a_generator_that_breaks_ends_the_rollout_of_every_rank():
    def broken(requests):
        raise ZeroDivisionError

    first, second = run_ranks([1, 1], lambda rank: Threaded(broken) if rank == 0 else None)
    assert isinstance(first, ZeroDivisionError)
    assert "rollout of process 0" in str(second)


@pytest.mark.parametrize("rows", [[3, 1], [0, 2]])
def test_ranks_of_a_parallel_engine_sample_the_same_requests_in_the_same_order(rows):
    generators = [Replying() for _ in rows]
    results = run_ranks(rows, lambda rank: Stepped(generators[rank]), everywhere=True)
    alone = summary(roll([None] * max(rows), generate=Replying()))
    assert [summary(result) for result in results] == [alone[:count] for count in rows]
    assert generators[0].calls == generators[1].calls
    assert len(generators[0].calls) == sum(len(t.steps) for result in results for t in result)


def test_a_request_that_fails_is_told_to_its_rank():
    source = Stepped(Replying(), refuse=lambda request: request.trajectory % 2 == 1)  # all rows of rank 1
    first, second = run_ranks([2, 2], lambda rank: source if rank == 0 else None)
    assert [t.stop for t in first] == [StopReason.COMPLETED] * 2
    assert [(t.stop, t.fault) for t in second] == [(StopReason.ENVIRONMENT_LOST, "generation: refused")] * 2


def test_a_rank_that_breaks_off_ends_the_rollout_of_the_others():
    def fail(rank):
        if rank == 1:
            raise ZeroDivisionError

    source = Threaded(Replying())
    first, second, third = run_ranks([2, 2, 0], lambda rank: source if rank == 0 else None, fail=fail)
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, RuntimeError)
        assert "rollout of process 1 ended with an error" in str(other)
