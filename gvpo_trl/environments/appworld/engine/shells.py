"""Prepares the Python shell in which agent code runs, in a host before it forks.

Both isolation modes use it. With `process` the shell belongs to the process that holds the world; with `split` it
belongs to a process without a world.
"""

import ast
import contextlib
import functools
import pkgutil
import sys

REHEARSED_CODE = (
    "print([1], {'a': 1}, 'x')",
    "import re, datetime\nprint(datetime.datetime.strptime('2023-05-18', '%Y-%m-%d').strftime('%A'))",
    "def f():\n    return [1 / 0 for _ in range(1)]\nf()",
    "try:\n    {}['x']\nexcept KeyError as error:\n    raise ValueError('y') from error",
    "undefined_nam",
    "raise Exception('Response status code is 409:')",
    "return 1",
    "import os\nos.listdir()",
    "a = (",
    "import asyncio\nawait asyncio.sleep(0)",
    "print(DateTime.now(), pendulum.now().diff_for_humans(), pendulum.parse('2023-05-18'))",
    "import difflib, pprint, textwrap, uuid, yaml\nprint(yaml.safe_load('a: 1'), uuid.uuid4())",
)
"""Code of many kinds. A host runs it once, so that all modules it needs are imported before the restriction."""
NOT_IMPORTED = {
    *("__main__", "antigravity", "idlelib", "lib2to3", "nturl2path", "pydoc_data", "readline", "rlcompleter", "test"),
    *("this", "tkinter", "turtle", "turtledemo"),
}
"""Modules of the standard library that print, open windows or change the terminal when imported, or are of no use."""
PACKAGES = (
    *("asyncio", "collections", "concurrent.futures", "email", "email.mime", "encodings", "html", "http", "importlib"),
    *("json", "logging", "sqlite3", "unittest", "urllib", "xml", "xml.dom", "xml.etree", "zoneinfo"),
)
"""Packages whose modules are imported one by one."""
KEPT_ALIVE: list = []
"""Time zones that stay in memory. `zoneinfo` and pendulum drop those that nothing refers to."""


def new_shell():
    """Return a shell like the one that the constructor of `AppWorld` makes."""
    import appworld.environment as environment
    from traitlets.config.loader import Config

    config = Config()
    config.HistoryManager.enabled = False
    hook = sys.excepthook
    shell = environment.InteractiveShellEmbed(config=config)
    sys.excepthook = hook
    shell.ast_node_interactivity = "none"
    return shell


def shell_with(preamble: str):
    """Return a shell in which the preamble of every world has run. It skips the preamble when told to run it again."""
    shell = new_shell()
    shell.run_cell(preamble)

    def run_cell_once(raw_cell, *args, **kwargs):
        assert raw_cell == preamble, "a world begins with its preamble"
        del shell.run_cell
        return None

    shell.run_cell = run_cell_once
    return shell


def make_stand_in(max_interactions: int, timeout_seconds: int):
    """Return an `AppWorld` object without a world on which `execute` works. Its preamble has run; it saves nothing.

    Its `apis` and `requester` do nothing until an episode sets them.
    """
    import types

    import appworld.environment as environment

    world = object.__new__(environment.AppWorld)
    for name in environment.AppWorld.init_defaults.__fields__:
        setattr(world, name, getattr(environment.AppWorld.init_defaults, name))
    world.max_interactions, world.timeout_seconds = max_interactions, timeout_seconds
    world.task = types.SimpleNamespace(datetime=None, allowed_apps=[])
    world.models_to_db_home_path = world.models_from_db_home_path = world.output_db_home_path_on_disk = ""
    world.num_interactions, world.environment_io = 0, []
    world._save_state, world.save_logs = lambda directory: None, lambda: None
    world.safety_guard = environment.SafetyGuard()
    world.shell = new_shell()
    collection = environment.ApiCollection
    environment.ApiCollection = types.SimpleNamespace(load=lambda **kwargs: (None, _NoRequester()))
    try:
        world._execute_preamble()
    finally:
        environment.ApiCollection = collection
    return world


class _NoRequester:
    def reset_request_count(self) -> None:
        """Do nothing, because there are no requests."""


def preload() -> None:
    """Import what agent code can import, and what these modules import or read later.

    An interpreter cannot open any file after the restriction.
    """
    import importlib
    import warnings

    from appworld.common import safety_guard

    names = sorted({*safety_guard.ALLOWED_MODULE_NAMES, *sys.stdlib_module_names} - NOT_IMPORTED)
    for package in PACKAGES:
        modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
        names += [f"{package}.{module.name}" for module in modules if module.name != "__main__"]
    names += ["appworld.common.random", "appworld.apps.api_lib"]  # AppWorld's dates import these at first use
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    _read_time_zones()


def _read_time_zones() -> None:
    """Read every time zone, because pendulum and `zoneinfo` then find it in memory."""
    import time
    import zoneinfo

    import pendulum
    import pendulum.locales

    time.tzset()
    for name in sorted(zoneinfo.available_timezones()):
        with contextlib.suppress(Exception):
            KEPT_ALIVE.append(zoneinfo.ZoneInfo(name))
    for module in pkgutil.iter_modules(pendulum.locales.__path__):
        with contextlib.suppress(Exception):
            pendulum.locale(module.name)
    for name in pendulum.timezones():
        with contextlib.suppress(Exception):
            KEPT_ALIVE.append(pendulum.timezone(name))


def rehearse(world) -> None:
    """Run code of many kinds in an object that `make_stand_in` returned, then undo its effects."""
    namespace = dict(world.shell.user_ns)
    for code in REHEARSED_CODE:
        world.execute(code)
    world.shell.user_ns.clear()
    world.shell.user_ns.update(namespace)
    world.num_interactions = 0
    world.environment_io.clear()


def freeze_clock() -> None:
    """Freeze the host's clock, which makes it cheap for children to freeze theirs to a date of their own."""
    from datetime import datetime

    from appworld.apps.api_lib import set_local_date_and_time

    set_local_date_and_time(datetime(2023, 5, 18, 12, 0, 0))


def quicken_guard() -> None:
    """Skip AppWorld's guard for code that it cannot refuse, because the guard parses the code three times.

    The guard refuses imports of modules and calls of functions on a list. Code that imports allowed modules only, and
    in which no identifier is the last part of a listed function's path, cannot be refused.
    """
    from appworld.common import safety_guard

    listed = {path.rpartition(".")[2] for path in safety_guard.DISALLOWED_FUNCTION_PATHS}
    is_syntax_safe = safety_guard.SafetyGuard.is_syntax_safe

    def identifiers(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            return [part for name in (module, *(alias.name for alias in node.names)) for part in name.split(".")]
        return [getattr(node, "attr", None) or getattr(node, "id", None)]

    def could_be_refused(node: ast.AST) -> bool:
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "." if node.names[0].name != "*" and not node.level else "."]
        if any(module.split(".")[0] not in safety_guard.ALLOWED_MODULE_NAMES for module in modules):
            return True
        return not listed.isdisjoint(identifiers(node))

    def quick(self, code: str) -> tuple[bool, str]:
        with contextlib.suppress(Exception):
            if not any(could_be_refused(node) for node in ast.walk(ast.parse(code))):
                return True, ""
        return is_syntax_safe(self, code)

    safety_guard.SafetyGuard.is_syntax_safe = quick
    # Before and after each step the guard swaps some hundred functions, and looks up the module of each.
    find = safety_guard.SafetyGuard.module_by_path.__func__
    safety_guard.SafetyGuard.module_by_path = classmethod(functools.cache(find))
