"""What a world has changed, on disk after each step, for the day that its process is killed: appworld's packages.

AppWorld writes the whole state again after each step, which takes a fifth of an episode's time. The journal takes the
step's new statements in one line; a world that is opened again on a journal saves what its predecessor would have.
"""

import os


class Journal:
    """The changes of one open world. Made when nothing has run in it yet; takes over what an earlier one left.

    Args:
        path: of the file, in a folder that exists and that the world does not empty.
        home: the world's name of its databases.
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
        """Write down what changed since the last time; all of it, where the file is not as it was left.

        Raises:
            OSError: the disk takes no more.
            TypeError: a value that a state cannot hold.
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
        for line in lines[:-1]:  # what has no end was not written to its end
            entry = orjson.loads(line)
            for name, changes in entry["changes"].items():
                self._trackers[name].changes.extend(changes)
            for app, counts in entry["hashes"].items():
                for model, count in counts.items():
                    self._hashes[app][model] = count
