"""The base databases of all apps, loaded into memory in a host so that its children inherit them.

There is one set for each of the two states of a task. A forked process owns its copy, so processes share nothing after
the fork, and no file is open that a fork could harm.
"""

import os

KINDS = {"start": "task_input", "end": "task_output"}
"""AppWorld's names of two states: the one that a task starts from, and the one that an agent leaves."""


class Databases:
    """One engine, tracker and connection per app and state, as AppWorld makes them, with the base data loaded."""

    def __init__(self) -> None:
        from appworld.apps import get_all_apps, model_lib

        self._model_lib = model_lib
        self._load = model_lib.get_db_args
        self._sources = {app: self._read_base(app) for app in get_all_apps()}
        self._ready = {(kind, app): self._make(kind, app) for kind in KINDS.values() for app in self._sources}
        self._taken: set[tuple[str, str]] = set()
        self._untouched = {key: connection.total_changes for key, (_, _, connection) in self._ready.items()}
        model_lib.get_db_args = self._get_db_args

    def _read_base(self, app: str):
        """Return a copy of the base database in memory."""
        import sqlite3

        home = self._model_lib.get_db_home_path(storage_type="disk", type="base")
        file = self._model_lib.get_direct_sqlite3_connection(os.path.join(home, f"{app}.db"))
        copy = sqlite3.connect(":memory:", check_same_thread=False)
        file.backup(copy)
        file.close()
        return copy

    def _make(self, kind: str, app: str) -> tuple:
        engine = self._model_lib.get_db_engine(f":memory:ready-{kind}/{app}.db")
        connection = engine.raw_connection().connection
        self._sources[app].backup(connection)
        tracker = self._model_lib.DBChangesTracker(engine)
        tracker.restart()
        return engine, tracker, connection

    def _get_db_args(self, to_db_app_path: str, from_db_app_path: str | None = None) -> tuple:
        """Hand out each ready database once, with the requested changes applied, in place of AppWorld's function."""
        kind, _, name = to_db_app_path.removeprefix(":memory:").partition("-")
        app = os.path.basename(name).rsplit(".")[0]
        changes = (from_db_app_path or "").rsplit(".", 1)[0] + ".jsonl"
        if (kind, app) not in self._ready or (kind, app) in self._taken or not os.path.exists(changes):
            return self._load(to_db_app_path, from_db_app_path)
        self._taken.add((kind, app))
        engine, tracker, connection = self._ready[kind, app]
        # AppWorld counts changes under the name in the address, so it has to be the usual one.
        engine.url = engine.url.set(database="file:" + to_db_app_path.removeprefix(":memory:"))
        tracker.add_changes(self._model_lib.apply_db_changes(connection, changes))
        return engine, tracker

    def restore(self) -> None:
        """Take back every database that was handed out, and undo all changes to it."""
        from appworld.common.utils import import_models_module

        for app in self._sources:
            # A model class keeps the name under which it last saw an engine, until it sees another one.
            import_models_module(app).SQLModel.db.engine = None
        self._model_lib.CachedDBHandler.cache.clear()
        self._model_lib.ModelHashHandler.reset()
        for taken in self._taken:
            _, tracker, connection = self._ready[taken]
            if connection.total_changes != self._untouched[taken]:
                self._sources[taken[1]].backup(connection)
                self._untouched[taken] = connection.total_changes
            tracker.reset()
        self._taken.clear()
