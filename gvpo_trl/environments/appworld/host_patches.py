"""Run-time patches that make forked worlds fast: what every world does alike is done once, before the fork.

Nothing of AppWorld is changed on disk, and nothing that an agent or an evaluation sees changes: `fast=False` runs
without them, and a test compares the two on the pocket tasks. Each patch leans on one fact: a forked process holds
one world, ever. They know the inner workings of the one version that the set-up installs.
"""

import ast
import contextlib
import gc
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Halve the time that building AppWorld's apps takes.

    FastAPI asks for hundreds of parameters whether their type is a pydantic model. The answer for a type that is none
    walks the tree of all models, which grows with each app; the type's own bases say the same.
    """
    import fastapi._compat
    from pydantic import BaseModel

    original = fastapi._compat.lenient_issubclass

    def quick(cls, classes) -> bool:
        if classes is BaseModel:
            return isinstance(cls, type) and BaseModel in cls.__mro__
        return original(cls, classes)

    patched = [m for m in list(sys.modules.values()) if getattr(m, "lenient_issubclass", None) is original]
    gc.disable()
    for module in patched:
        module.lenient_issubclass = quick
    try:
        yield
    finally:
        for module in patched:
            module.lenient_issubclass = original
        gc.enable()


class Prepared:
    """What the host keeps ready for its children. Made once, after a first world was opened and closed."""

    def __init__(self, preamble: str) -> None:
        self.start = _Databases("start")
        self.end = _Databases("end")
        self.shell = _shell_with(preamble)
        _cache_main_app()
        _skip_guard_for_harmless_code()
        _freeze_clock()

    def for_episode(self) -> None:
        """In the child: take what is ready, and leave out what would throw it away."""
        import appworld.environment as environment
        from appworld.task import Task

        self.end.serve("task_output")
        environment.InteractiveShellEmbed = lambda config: self.shell
        # The task's input is wanted for its path alone; a process that never had a world has nothing to close.
        Task.model_collection = property(lambda task: _OnlyPath(task.models_from_db_home_path))
        environment.AppWorld.close_all = classmethod(lambda cls, *args, **kwargs: None)
        _save_only_changes(environment.AppWorld)

    def for_evaluation(self) -> None:
        """In the child: both states start from databases that are ready."""
        self.start.serve("task_input")
        self.end.serve("task_output")


def _save_only_changes(world_class) -> None:
    """Write the state after steps that changed it, and the logs at the end.

    What is on disk after each step is the state, or nothing while that is still the task's own.
    """
    save_state, save_logs = world_class._save_state, world_class.save_logs

    def save_if_changed(world, directory: str) -> None:
        changes = count_changes()
        before = getattr(world, "saved_changes", changes)
        world.saved_changes = changes
        if changes != before:
            save_state(world, directory)

    def save_all(world) -> None:
        save_state(world, world.output_db_home_path_on_disk)
        save_logs(world)

    world_class._save_state = save_if_changed
    world_class.save_logs = lambda world: None
    world_class.save_all = save_all


def count_changes(app: str = "") -> int:
    """How many statements changed the databases of the app, or of all apps, since they were made."""
    from appworld.apps.model_lib import CachedDBHandler

    entries = CachedDBHandler.cache.items()
    return sum(len(tracker.changes) for path, (_, tracker) in entries if path.endswith(f"{app}.db"))


class _OnlyPath:
    def __init__(self, path: str) -> None:
        self.from_db_home_path = path


class _Databases:
    """The base databases of all apps, in memory, each with an engine and a tracker as a world wants them."""

    def __init__(self, name: str) -> None:
        from appworld.apps import get_all_apps, model_lib

        self.ready = {}
        for app in get_all_apps():
            engine = model_lib.get_db_engine(f":memory:prepared-{name}/{app}.db")
            connection = engine.raw_connection().connection
            base = os.path.join(model_lib.get_db_home_path(storage_type="disk", type="base"), f"{app}.db")
            source = model_lib.get_direct_sqlite3_connection(base)
            source.backup(connection)
            source.close()
            tracker = model_lib.DBChangesTracker(engine)
            tracker.restart()
            self.ready[app] = (engine, tracker, connection)

    def serve(self, kind: str) -> None:
        """Have databases of the kind (`task_input`, `task_output`) come from here instead of from the disk."""
        from appworld.apps import model_lib

        load = model_lib.get_db_args
        prefix = f":memory:{kind}-"

        def get_db_args(to_db_app_path: str, from_db_app_path: str | None = None):
            app = os.path.basename(to_db_app_path).rsplit(".")[0]
            changes = (from_db_app_path or "").rsplit(".", 1)[0] + ".jsonl"
            if not to_db_app_path.startswith(prefix) or app not in self.ready or not os.path.exists(changes):
                return load(to_db_app_path, from_db_app_path)
            engine, tracker, connection = self.ready.pop(app)
            # AppWorld counts changes under the name in the address, so it has to be the usual one.
            engine.url = engine.url.set(database="file:" + to_db_app_path.removeprefix(":memory:"))
            tracker.add_changes(model_lib.apply_db_changes(connection, changes))
            return engine, tracker

        model_lib.get_db_args = get_db_args


def _shell_with(preamble: str):
    """An interpreter in which the preamble of every world has run; it passes over it once."""
    import appworld.environment as environment
    from traitlets.config.loader import Config

    config = Config()
    config.HistoryManager.enabled = False
    hook = sys.excepthook
    shell = environment.InteractiveShellEmbed(config=config)
    sys.excepthook = hook
    shell.ast_node_interactivity = "none"
    shell.run_cell(preamble)
    run_cell = shell.run_cell

    def run_cell_once(raw_cell, *args, **kwargs):
        assert raw_cell == preamble, "a world begins with its preamble"
        del shell.run_cell
        return None

    shell.run_cell = run_cell_once
    assert shell.run_cell is not run_cell
    return shell


def _cache_main_app() -> None:
    import functools

    import appworld.requester as requester

    requester.build_main_app = functools.cache(requester.build_main_app)
    requester.build_main_app(tuple(sorted(requester.get_all_apps())))


def _freeze_clock() -> None:
    """Freeze the host's clock: in its children, which freeze it again to their own date, that costs nothing more."""
    from datetime import datetime

    from appworld.apps.api_lib import set_local_date_and_time

    set_local_date_and_time(datetime(2023, 5, 18, 12, 0, 0))


def _skip_guard_for_harmless_code() -> None:
    """Ask AppWorld's guard only where it could refuse: it parses the code three times, slowly.

    The guard refuses imports of modules and calls of functions on a list. Code without any import statement in which
    no identifier is the last part of a listed function's path cannot be refused.
    """
    from appworld.common import safety_guard

    listed = {path.rpartition(".")[2] for path in safety_guard.DISALLOWED_FUNCTION_PATHS}
    is_syntax_safe = safety_guard.SafetyGuard.is_syntax_safe

    def quick(self, code: str) -> tuple[bool, str]:
        with contextlib.suppress(Exception):
            for node in ast.walk(ast.parse(code)):
                name = getattr(node, "attr", None) or getattr(node, "id", None)
                if isinstance(node, ast.Import | ast.ImportFrom) or name in listed:
                    return is_syntax_safe(self, code)
            return True, ""
        return is_syntax_safe(self, code)

    safety_guard.SafetyGuard.is_syntax_safe = quick
