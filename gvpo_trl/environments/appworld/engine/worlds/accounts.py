"""Keeps agent code out of accounts whose password it does not know: access tokens, secret codes, notifiers' accounts.

AppWorld signs access tokens with a constant, draws secret codes from `random`, which agent code can seed, and gives
the accounts that send these codes one password for all. Each rule here holds where the endpoint runs or where AppWorld
verifies a token, so it does not matter by which address or parameter a call gets there.
"""

import contextlib
import functools
from collections.abc import Callable

from gvpo_trl.environments.appworld.wire import values

NOTIFIER_PREFIX = "notifications@"
"""Prefix of the email addresses from which AppWorld's apps send codes."""
_ADDRESSES = ("email", "phone_number")
"""Parameters that name the account of a secret code."""


class Accounts:
    """The rules on the accounts of one open world, which hold as soon as this object exists.

    Args:
        world: an open `AppWorld`.
        endpoints: maps the functions of the public APIs to (app, API).
        random: the `random` that this process shares with the interpreter.
    """

    def __init__(self, world, endpoints: dict[Callable, tuple[str, str]], random: values.SharedRandom) -> None:
        from appworld.apps import get_all_apps
        from appworld.apps.api_lib import CompanyNotifier

        supervisor = world.task.supervisor
        self._own = {supervisor.email, supervisor.phone_number}
        self._random = random
        self._apps = [app for app, api in endpoints.values() if api == "login"]
        self._notifiers = [CompanyNotifier(app.replace("_", " ")) for app in get_all_apps()]
        self._given_out: set[str] = set()
        self._made_in_call: set[str] = set()
        self._guard_tokens()
        rules = {
            "login": self._guard_login,
            "signup": self._guard_signup,
            "send_verification_code": self._guard_code,
            "send_password_reset_code": self._guard_code,
        }
        for mounted in world.requester.client.app.routes:
            for route in getattr(getattr(mounted, "app", None), "routes", ()):
                app, api = endpoints.get(getattr(route, "endpoint", None), (None, None))
                if api in rules:
                    route.dependant.call = rules[api](app, route.dependant.call)

    def end_call(self, text: str) -> None:
        """Record the access tokens that the response of a call contains as given out."""
        self._given_out |= {token for token in self._made_in_call if token in text}
        self._made_in_call.clear()

    def _guard_tokens(self) -> None:
        """Make AppWorld refuse every token that this world has not given out; it verifies all of them in one place."""
        from appworld.apps.api_lib import LogInOutManager

        create, verify = LogInOutManager.create_access_token, LogInOutManager._get_payload

        def create_and_note(manager, **options) -> str:
            token = create(manager, **options)
            self._made_in_call.add(token)
            return token

        def verify_known(manager, token: str) -> dict:
            if token not in self._given_out and token not in self._made_in_call:
                raise manager.not_authenticated_exception
            return verify(manager, token)

        LogInOutManager.create_access_token, LogInOutManager._get_payload = create_and_note, verify_known

    def _guard_login(self, app: str, call: Callable) -> Callable:
        """Refuse a login to a notifier's account, whose mailbox holds the codes that it has sent."""
        from fastapi_login.exceptions import InvalidCredentialsException

        @functools.wraps(call)
        def login(**arguments):
            form = arguments["data"]
            password_is_known = form.password == self._notifiers[0].password
            if self._sends_codes(form.username) or (password_is_known and self._is_notifier(app, form.username)):
                raise InvalidCredentialsException
            return call(**arguments)

        return login

    def _guard_signup(self, app: str, call: Callable) -> Callable:
        """Refuse to create a notifier's account; draw the code for another person's account unpredictably."""
        from appworld.apps.api_lib import raise_http_exception

        @functools.wraps(call)
        def signup(**arguments):
            addresses = self._foreign_addresses(arguments)
            if any(map(self._sends_codes, addresses)):
                raise_http_exception("This account is not for agents.", status_code=403)
            with self._random.unpredictable() if any(map(self._is_known, addresses)) else contextlib.nullcontext():
                return call(**arguments)

        return signup

    def _guard_code(self, app: str, call: Callable) -> Callable:
        """Draw another person's code unpredictably."""

        @functools.wraps(call)
        def send_code(**arguments):
            with self._random.unpredictable() if self._foreign_addresses(arguments) else contextlib.nullcontext():
                return call(**arguments)

        return send_code

    def _foreign_addresses(self, arguments: dict) -> list[str]:
        named = [arguments[name] for name in _ADDRESSES if arguments.get(name) is not None]
        return [address for address in named if address not in self._own]

    def _find_user(self, app: str, address: str):
        from appworld.common.utils import import_models_module

        user = import_models_module(app).User
        found = None
        for name in _ADDRESSES:
            if found is None and name in user.__fields__:
                found = user.find_one(**{name: address})
        return found

    def _is_known(self, address: str) -> bool:
        """Whether an account in any app has this address."""
        return any(self._find_user(app, address) is not None for app in self._apps)

    def _sends_codes(self, address: str) -> bool:
        """Whether an app sends its codes from this address."""
        return address.lower().startswith(NOTIFIER_PREFIX) or any(
            address == notifier.phone_number for notifier in self._notifiers
        )

    def _is_notifier(self, app: str, address: str) -> bool:
        """Whether the account with this address looks like a notifier's that AppWorld made."""
        user, example = self._find_user(app, address), self._notifiers[0]
        return user is not None and (user.password, user.last_name) == (example.password, example.last_name)
