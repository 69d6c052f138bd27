"""Writes a world's changes to disk after each step, so that they survive when its process is killed.

AppWorld writes the whole state again after each step, which takes a fifth of an episode's time. The journal appends
the step's new statements as one line. A world that is opened on an existing journal saves the state that the world
before it would have saved.
"""

import os


class Journal:
    """The changes of one open world. Create it before any code runs in that world; it takes over an existing file.

    Args:
        path: the file, in a folder that exists and that the world does not empty.
        home: the world's name for its databases.
    """

    def __init__(self, path: str, home: str) -> None:
        from appworld.apps.model_lib import CachedDBHandler, ModelHashHandler

        self._path = path
        self._hashes = ModelHashHandler.data[home]
        trackers = {os.path.basename(name): tracker for name, (_, tracker) in CachedDBHandler.cache.items()}
        self._trackers = trackers
        self._start = {name: len(tracker.changes) for name, tracker in trackers.items()}
        self._recorded, self._size = dict(self._start), 0
        if os.path.exists(path):
            self._take_over()

    def record(self) -> None:
        """Append the changes since the last call. Write all of them again if the file is not as this object left it.

        Raises:
            OSError: the disk is full or broken.
            TypeError: a change has a value that a state cannot hold.
        """
        import orjson

        whole = self._size > 0 and (not os.path.exists(self._path) or os.path.getsize(self._path) != self._size)
        since = self._start if whole else self._recorded
        now = {name: len(tracker.changes) for name, tracker in self._trackers.items()}
        if now == since:
            return
        changes = {name: self._trackers[name].changes[since[name] :] for name in now if now[name] != since[name]}
        line = orjson.dumps({"changes": changes, "hashes": self._hashes}) + b"\n"
        with open(self._path, "wb" if whole else "ab") as file:
            file.write(line)
        self._size = len(line) if whole else self._size + len(line)
        self._recorded = now

    def _take_over(self) -> None:
        import orjson

        with open(self._path, "rb") as file:
            lines = file.read().split(b"\n")
        for line in lines[:-1]:  # the last line has no line end if its writer was killed
            entry = orjson.loads(line)
            for name, changes in entry["changes"].items():
                self._trackers[name].changes.extend(changes)
            for app, counts in entry["hashes"].items():
                for model, count in counts.items():
                    self._hashes[app][model] = count
