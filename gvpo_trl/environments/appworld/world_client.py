"""AppWorld's apps called in the thread that asks: standard library and appworld's packages.

AppWorld sends each API call through a test client whose server runs in a thread with an event loop, and the server
hands the endpoint to a third thread: four changes of thread a call, and none of them waits for anything. A world's
process makes one call at a time and is interrupted by nobody, so its apps run as plain function calls. Where agent
code runs in the same process they must not: a step's time-out would interrupt an endpoint half-way.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator


class Portal:
    """What a test client calls its app through."""

    @staticmethod
    def call(function: Callable, *args):
        """The function's result; a coroutine runs to its end, for which it may wait for nothing."""
        result = function(*args)
        if not hasattr(result, "send"):
            return result
        try:
            result.send(None)
        except StopIteration as end:
            return end.value
        result.close()
        raise RuntimeError("an API waits for an event loop")


@contextlib.contextmanager
def _portal() -> Iterator[Portal]:
    yield Portal()


async def _run_here(function: Callable, *args, abandon_on_cancel=False, cancellable=None, limiter=None):
    return function(*args)


def call_without_threads() -> None:
    """Have worlds that are opened from now on call their apps in the caller's thread."""
    import anyio.to_thread
    from appworld import requester
    from starlette.testclient import TestClient

    original = anyio.to_thread.run_sync
    for module in list(sys.modules.values()):
        if getattr(module, "run_sync", None) is original:
            module.run_sync = _run_here

    def get_client(self) -> TestClient:
        client = TestClient(requester.build_main_app(self.apps))
        client._transport.portal_factory = _portal
        return client

    requester.Requester._get_client = get_client
