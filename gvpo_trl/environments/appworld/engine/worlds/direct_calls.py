"""Calls AppWorld's apps in the calling thread.

AppWorld sends each API call through a test client whose server runs in a thread with an event loop, and the server
hands the endpoint to a third thread. That makes four changes of thread a call, although no endpoint ever waits. A
process that holds one world makes one call at a time, so its apps run as plain function calls. Where agent code runs
in the same process, the step's time-out must not interrupt an endpoint. With threads it cannot, because its signal
reaches the main thread alone; without them the signal is blocked during a call.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

from gvpo_trl.environments.appworld.engine import verdicts


class Portal:
    """Stands in for the portal through which a test client calls its app."""

    @staticmethod
    def call(function: Callable, *args):
        """Return the function's result. A coroutine runs to its end, and must not wait for anything."""
        result = function(*args)
        if not hasattr(result, "send"):
            return result
        try:
            result.send(None)
        except StopIteration as end:
            return end.value
        result.close()
        raise RuntimeError("an API waits for an event loop")


class UninterruptedPortal(Portal):
    """A portal for apps that agent code calls. A time-out waits for their end; they have full recursion depth."""

    @staticmethod
    def call(function: Callable, *args):
        """Do what `Portal.call` does, without an interruption."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            with verdicts.full_recursion_depth():
                return Portal.call(function, *args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _run_here(function: Callable, *args, abandon_on_cancel=False, cancellable=None, limiter=None):
    return function(*args)


def call_without_threads(uninterrupted: bool) -> None:
    """Make worlds that are opened from now on call their apps in the caller's thread.

    Args:
        uninterrupted: whether a step's time-out, which is a SIGALRM, must not interrupt them.
    """
    import anyio.to_thread
    from appworld import requester
    from starlette.testclient import TestClient

    original = anyio.to_thread.run_sync
    for module in list(sys.modules.values()):
        if getattr(module, "run_sync", None) is original:
            module.run_sync = _run_here

    @contextlib.contextmanager
    def portal() -> Iterator[Portal]:
        yield UninterruptedPortal() if uninterrupted else Portal()

    def get_client(self) -> TestClient:
        client = TestClient(requester.build_main_app(self.apps))
        client._transport.portal_factory = portal
        return client

    requester.Requester._get_client = get_client
