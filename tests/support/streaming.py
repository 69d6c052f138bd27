"""Generators without a model that return their turns one by one."""

from concurrent.futures import Future, ThreadPoolExecutor

from gvpo_trl.faults import GenerationFault
from gvpo_trl.rollout.types import Turn
from tests.support.toy import Scripted


class Stepped:
    """A `StreamingGenerate` that the loop's thread drives, as it does a colocated engine: `advance` ends one turn.

    Args:
        generate: a batch generator that makes the turns.
        first: is called with the requests in flight and returns the index of the one to end, or `None` to end none.
        refuse: is called with a request and returns whether it fails.
    """

    def __init__(self, generate, first=lambda flying: 0, refuse=lambda request: False):
        self.generate, self.first, self.refuse = generate, first, refuse
        self.flying = []
        self.asked = []

    def submit(self, request):
        future = Future()
        self.asked.append(request)
        self.flying.append((request, future))
        return future

    def advance(self):
        place = self.first([request for request, _ in self.flying]) if self.flying else None
        if place is not None:
            request, future = self.flying.pop(place)
            if self.refuse(request):
                future.set_exception(GenerationFault("refused"))
            else:
                future.set_result(self.generate([request])[0])
        return bool(self.flying)


class Threaded:
    """A `StreamingGenerate` that samples in its own threads, as a server does."""

    def __init__(self, generate):
        self.generate = generate
        self.pool = ThreadPoolExecutor(8)

    def submit(self, request):
        return self.pool.submit(lambda: self.generate([request])[0])

    def advance(self):
        return False


class Counting:
    """A batch generator whose turns count on from the last id of the request until the budget is used up."""

    def __call__(self, requests):
        return [
            Turn(ids=[request.ids[-1] + 1 + n for n in range(request.max_new_tokens)], logprobs=None)
            for request in requests
        ]


def scripted(tokenizer, scripts):
    return Scripted(tokenizer, dict(enumerate(scripts)))
