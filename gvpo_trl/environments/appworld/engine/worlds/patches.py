"""Run-time patches that make forked worlds fast: work that is the same in every world is done once, before the fork.

Nothing of AppWorld is changed on disk, and nothing that an agent or an evaluation sees changes: `fast=False` runs
without them, and a test compares the two on the pocket tasks. Each patch relies on a forked process never holding more
than one world. The patches rely on internals of the one version of AppWorld that the set-up installs.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator

from gvpo_trl.environments.appworld.engine import shells
from gvpo_trl.environments.appworld.engine.worlds import databases, rehearsal
from gvpo_trl.environments.appworld.wire import texts, values

LOGGED_BYTES, LOGGED_NODES = 4 * 1024 * 1024, 200_000
"""Bytes and values of the calls that an episode's log shows whole; it shows later ones in brief."""
LOGGED_IN_BRIEF = 4_000
"""Calls that the log shows in brief; it leaves out later ones."""
NOT_LOGGED = {"method": "get", "url": "", "data": {}}
"""Stands for a request that is not logged, because AppWorld counts a step's requests by the length of their list."""


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Halve the time that building AppWorld's apps takes.

    FastAPI asks for hundreds of parameters whether their type is a pydantic model. For another type it walks the tree
    of all models, which grows with each app. The type's own bases give the same answer.
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
    """Holds what the host keeps ready for its children. Create it once, after a first world was opened and closed.

    Args:
        preamble: the code that every world runs first.
        open_world: opens a world of a task under an experiment name.
        task_id: the task to rehearse with.
        rehearse: whether to make all kinds of calls and queries once; see `rehearsal`.
    """

    def __init__(self, preamble: str, open_world: Callable, task_id: str, rehearse: bool) -> None:
        import appworld.environment as environment

        self.databases = ready = databases.Databases()
        _cache_main_app()
        shells.quicken_guard()
        # A new process has no world to close, and the end of a process closes its world.
        environment.AppWorld.close_all = classmethod(lambda cls, *args, **kwargs: None)
        environment.clear_local_dbs_cache = lambda task_id=None: None
        world = open_world(task_id, "warm-up")
        world.execute("print(apis.api_docs.show_app_descriptions())")
        if rehearse:
            rehearsal.rehearse_calls(world)
        self.docs = _read_docs()
        world.close()
        ready.restore()
        if rehearse:
            rehearsal.rehearse_evaluation(task_id)
            ready.restore()
        self.shell = shells.shell_with(preamble)
        shells.freeze_clock()

    def for_evaluations(self) -> None:
        """Keep the details of each engine, in a child whose evaluations ask for them at each change of state."""
        from appworld.apps.model_lib import Database

        spell_out = Database._get_engine_to_details

        def look_up(engine) -> tuple:
            known = vars(engine).get("gvpo_details")
            if known is None or known[0] is not engine.url:
                known = engine.gvpo_details = engine.url, spell_out(engine)
            return known[1]

        Database._get_engine_to_details = staticmethod(look_up)

    def for_episode(self) -> None:
        """Apply the patches that hold for episodes and not for evaluations, in a child."""
        import appworld.environment as environment
        from appworld.task import Task

        environment.InteractiveShellEmbed = lambda config: self.shell
        # The world uses nothing of the task's input but its path.
        Task.model_collection = property(lambda task: _OnlyPath(task.models_from_db_home_path))
        _save_at_the_end(environment.AppWorld)
        _serve_docs(self.docs)


def _read_docs() -> list:
    from appworld.apps.api_docs.models import ApiDoc

    docs = ApiDoc.all()
    for doc in docs:
        doc._db_home_path = None  # the document belongs to no world's database
    return docs


def _serve_docs(docs: list) -> None:
    """Answer documentation calls from memory; each of them reads all 450 records, which no call changes."""
    from appworld.apps.api_docs.models import ApiDoc

    read_all = ApiDoc.all

    def serve_all(cls) -> list:
        return read_all() if count_changes("/api_docs") else list(docs)

    ApiDoc.all = classmethod(serve_all)


class _OnlyPath:
    def __init__(self, path: str) -> None:
        self.from_db_home_path = path


def _save_at_the_end(world_class) -> None:
    """Write the state and the logs once, at the end. A world with a `journal` records its changes meanwhile."""
    save_state, save_logs = world_class._save_state, world_class.save_logs

    def record_changes(world, directory: str) -> None:
        if world.journal is not None:
            world.journal.record()

    def note_logs(world) -> None:
        world.logged_steps = len(world.environment_io)

    def save_all(world) -> None:
        save_state(world, world.output_db_home_path_on_disk)
        # AppWorld writes its logs after a step that ran, so they lack the refused steps after the last such step.
        del world.environment_io[world.logged_steps :]
        save_logs(world)

    world_class.journal = None
    world_class._save_state = record_changes
    world_class.save_logs = note_logs
    world_class.save_all = save_all


def save_any_log(world) -> None:
    """Let a world write its logs whatever was printed or passed to a call. AppWorld's code fails on some values."""
    save_texts, save_calls = world._save_environment_io_log, world._save_api_calls_log

    def save_any_texts() -> None:
        for entry in world.environment_io:
            entry.update({name: texts.spelled_out(text) for name, text in entry.items()})
        save_texts()

    def save_any_calls() -> None:
        requests = world.requester.request_tracker.requests
        requests[:] = [request for request in requests if request is not NOT_LOGGED]
        for whole in (True, False):
            try:
                return save_calls()
            except OSError:
                raise
            except Exception:
                # The check accepts nesting that can be too deep for the writer. Then no request is logged whole.
                requests[:] = [loggable(request, whole) for request in requests]
        return save_calls()

    world._save_environment_io_log, world._save_api_calls_log = save_any_texts, save_any_calls


def loggable(request: dict, whole: bool = True) -> dict:
    """Return the request, or a short text of it, because a log that cannot be written would cost a row its score."""
    from fastapi.encoders import jsonable_encoder

    try:
        if whole:
            json.dumps(jsonable_encoder(request)).encode()
            return request
        raise ValueError("too long")
    except Exception:
        try:
            data = texts.spelled_out(repr(request["data"]))[:1000]
        except Exception:
            data = "nothing that can be written"
        return {"method": request["method"], "url": texts.spelled_out(str(request["url"])), "data": data}


class RequestLog:
    """Bounds what the log keeps of requests, so that agent code cannot make it large or slow to write.

    Args:
        requests: the list in which AppWorld keeps the requests of an episode.
    """

    def __init__(self, requests: list[dict]) -> None:
        self.requests = requests
        self._bytes = self._nodes = self._brief = 0

    def bound_from(self, first: int, size: int) -> list[dict]:
        """Bound the requests from number `first` on, which a call of `size` bytes made, and return those kept."""
        for index in range(first, len(self.requests)):
            self.requests[index] = self._bound(self.requests[index], size)
        return [request for request in self.requests[first:] if request is not NOT_LOGGED]

    def _bound(self, request: dict, size: int) -> dict:
        self._bytes += size
        self._nodes += _count_nodes(request["data"])
        if self._bytes <= LOGGED_BYTES and self._nodes <= LOGGED_NODES:
            return loggable(request)
        self._brief += 1
        return loggable(request, whole=False) if self._brief <= LOGGED_IN_BRIEF else NOT_LOGGED


def _count_nodes(value) -> int:
    count, waiting = 0, [value]
    while waiting:
        count, value = count + 1, waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, values.Described):
            waiting.append(value.logged)
    return count


class BoundedStatements(list):
    """The statements that changed a database. All databases of a world share one budget of bytes."""

    def __init__(self, changes: list, budget: "ByteBudget") -> None:
        super().__init__(changes)
        self.budget = budget

    def append(self, change: tuple) -> None:
        """Add a statement.

        Raises:
            ValueError: the budget is spent; the call that made the statement fails.
        """
        self.budget.spent += _length(change)
        if self.budget.spent > self.budget.most:
            raise ValueError("This episode has changed more than any task needs.")
        super().append(change)


class ByteBudget:
    """Counts the bytes of an episode's statements, and holds how many they may have in all."""

    def __init__(self, most: int) -> None:
        self.most, self.spent = most, 0


def _length(value) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(_length(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return sum(_length(entry) for entry in value)
    return 8


def bound_changes(most: int) -> ByteBudget:
    """Bound the bytes of the open world's statements, which stay in memory until they are saved."""
    from appworld.apps.model_lib import CachedDBHandler

    budget = ByteBudget(most)
    for _, tracker in CachedDBHandler.cache.values():
        tracker.changes = BoundedStatements(tracker.changes, budget)
    return budget


def count_changes(app: str = "") -> int:
    """Return how many statements changed the databases of `app`, or of all apps, since the databases were made."""
    from appworld.apps.model_lib import CachedDBHandler

    entries = CachedDBHandler.cache.items()
    return sum(len(tracker.changes) for path, (_, tracker) in entries if path.endswith(f"{app}.db"))


def _cache_main_app() -> None:
    import functools

    import appworld.requester as requester

    requester.build_main_app = functools.cache(requester.build_main_app)
    requester.build_main_app(tuple(sorted(requester.get_all_apps())))
