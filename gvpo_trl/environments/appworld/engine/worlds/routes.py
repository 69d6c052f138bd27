"""Keeps agents' API calls on public routes, whatever their arguments are, and tells which endpoint a call reaches.

AppWorld writes the text of a path parameter into the address as it is, and the client resolves `..` in it. So a call
of a public API can reach another endpoint: `note_id="../../dbs"` would reach the routes that load and save databases.
The guard therefore decides by the endpoint, which is the function that the server would run.
"""

from collections.abc import Callable

NOWHERE = "/nowhere"
"""A path without a route, which the server answers as it answers any unknown address."""
Endpoints = dict[Callable, tuple[str, str]]
"""Maps the functions of public APIs to (app, API)."""


def public_endpoints(public: dict[str, list[str]]) -> Endpoints:
    """Return a map from the functions of the public APIs to (app, API); `public` names the APIs by app."""
    from appworld.common.utils import get_name_to_apis

    return {
        endpoint: (app, name)
        for app, names in public.items()
        for name, endpoint in get_name_to_apis(app, ignore_private_apis=True).items()
        if name in names
    }


def guard_routes(client, endpoints: Endpoints, note: Callable[[str], None]) -> None:
    """Make a world's client run no other endpoints than these.

    Args:
        client: the world's test client.
        endpoints: what `public_endpoints` returned.
        note: is called with `app.api` of the endpoint that a request reaches.
    """
    transport = client._transport
    transport.app = _guarded(transport.app, client.app, endpoints, note)


def _guarded(serve: Callable, app, endpoints: Endpoints, note: Callable[[str], None]) -> Callable:
    async def guarded(scope, receive, send):
        assert scope["type"] in ("http", "lifespan"), "AppWorld has no websockets"
        endpoint = _find_endpoint(app, scope) if scope["type"] == "http" else None
        if endpoint is not None:
            if endpoint in endpoints:
                note(".".join(endpoints[endpoint]))
            else:
                scope = {**scope, "path": NOWHERE, "raw_path": NOWHERE.encode(), "query_string": b""}
        await serve(scope, receive, send)

    return guarded


def _find_endpoint(app, scope: dict) -> Callable | None:
    """Return the function that the server would run for a request; `None` if it would run none.

    The server answers "Method Not Allowed" to a path whose routes are all for other methods.
    """
    from starlette.routing import Match

    for route in app.routes:
        match, child_scope = route.matches(scope)
        if match is Match.FULL:
            inner = child_scope["endpoint"]
            return _find_endpoint(inner, {**scope, **child_scope}) if hasattr(inner, "routes") else inner
    return None
