"""Keeps agents' API calls on public routes, whatever their arguments are.

AppWorld writes the text of a path parameter into the address as it is, and the client resolves `..` in it. So a call
of a public API can reach another endpoint: `note_id="../../dbs"` would reach the routes that load and save databases.
The guard therefore decides by the endpoint, which is the function that the server would run.
"""

from collections.abc import Callable

NOWHERE = "/nowhere"
"""A path without a route, which the server answers as it answers any unknown address."""


def guard_routes(client, public: dict[str, list[str]]) -> None:
    """Make a world's client run no other endpoints than those of the public APIs, which `public` names by app."""
    from appworld.common.utils import get_name_to_apis

    endpoints = {
        endpoint
        for app, names in public.items()
        for name, endpoint in get_name_to_apis(app, ignore_private_apis=True).items()
        if name in names
    }
    transport = client._transport
    transport.app = _guarded(transport.app, client.app, endpoints)


def _guarded(serve: Callable, app, endpoints: set) -> Callable:
    async def guarded(scope, receive, send):
        if scope["type"] == "http" and not _find_endpoints(app, scope) <= endpoints:
            scope = {**scope, "path": NOWHERE, "raw_path": NOWHERE.encode(), "query_string": b""}
        elif scope["type"] == "websocket":
            raise RuntimeError("AppWorld has no websockets")
        await serve(scope, receive, send)

    return guarded


def _find_endpoints(app, scope: dict) -> set:
    """The function that the server would run for a request, in a set; the empty set if it would run none.

    The server answers "Method Not Allowed" to a path whose routes are all for other methods.
    """
    from starlette.routing import Match

    for route in app.routes:
        match, child_scope = route.matches(scope)
        if match is Match.FULL:
            inner = child_scope["endpoint"]
            return _find_endpoints(inner, {**scope, **child_scope}) if hasattr(inner, "routes") else {inner}
    return set()
