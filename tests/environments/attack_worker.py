"""Makes attempts on the real engine, as the user who runs it.

Run as `python -I attack_worker.py <repository>` by any interpreter. Standard input holds one JSON object: `root` (a
data root of its own), `venv`, `folder` (where to put things), `mode` (`split`, `process` or `open`), `secrets` (name
-> text), and `attacks` (ids). Standard output gets one JSON object: `records`, id -> what became of the attempt (see
`Maker.make`; `honest` is the reward of its honest steps alone), `changed`, the files of the data root that are others
now, `disturbed`, what happened to a decent episode meanwhile, and `folder`.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, sys.argv[1])

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.children import Child
from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.environments.appworld.hosts import Launch
from gvpo_trl.faults import EnvironmentFault
from tests.environments.attacks import PRELUDE, TASKS, Attack, Sign, every_attack
from tests.environments.support import solution

PARALLEL = 4
STEP_S, PATIENCE_S, SCORE_PATIENCE_S = 5, 12, 45
MAX_OUTPUT = 100_000
MAX_MARKS = 1_000
SHARED, GROUP = ("open", "/proc", "links", "others", "sizes", "sockets", "signals"), 10
"""Kinds of attempts that leave their episode intact, whether they work or not, and how many of them share one."""
SLOW = ("floods", "afterwards")
SPLIT = {"memory_mb": 1024, "max_output_chars": MAX_OUTPUT, "require_sandbox": True}
LOOSE = {"memory_mb": None, "max_output_chars": 1_500_000}


class Undefended(Launch):
    """Starts a host without its defences."""

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-I", str(Path(__file__).with_name("undefended.py")), self.module, *arguments]


def open_environment(work: dict) -> AppWorldEnvironments:
    mode = work["mode"]
    options = {"venv": work["venv"], "output_dir": work["folder"], "max_episodes": PARALLEL + 2, "rehearse": False}
    options |= {"step_timeout_s": STEP_S, "open_timeout_s": 8 if mode == "open" else 60, "max_interactions": 12}
    options |= SPLIT if mode == "split" else LOOSE
    environment = AppWorldEnvironments(work["root"], isolation="process" if mode == "process" else "split", **options)
    if mode == "open":
        for keeper in environment.machinery.keepers:
            launch = keeper.launch
            keeper.launch = Undefended(**vars(launch) | {"config": launch.config | {"boot": boot.__file__}})
        believe_every_death()
    return environment


def believe_every_death() -> None:
    """Make our side take its own kills for the kernel's, as a control."""
    end = Child.end

    def end_and_forget(child: Child, *args, **kwargs) -> None:
        end(child, *args, **kwargs)
        child.killed = False

    Child.end = end_and_forget


class Listener:
    """Hears what comes in over TCP, UDP and two kinds of Unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.heard = []
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.port = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", self.port))
        self.unix, self.abstract = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
        self.address = str(folder / "socket")
        self.unix.bind(self.address)
        os.chmod(self.address, 0o777)
        self.abstract.bind(f"\0gvpo-{os.getpid()}")
        for sock in (self.udp, self.unix, self.abstract):
            threading.Thread(target=self._hear, args=(sock,), daemon=True).start()
        threading.Thread(target=self._accept, daemon=True).start()

    def _hear(self, sock: socket.socket) -> None:
        while True:
            self.heard.append(sock.recv(1000).decode(errors="replace"))

    def _accept(self) -> None:
        while True:
            connection, _ = self.tcp.accept()
            with connection:
                connection.settimeout(5)
                with contextlib.suppress(OSError):
                    self.heard.append(connection.recv(1000).decode(errors="replace"))


class Maker:
    """Makes attempts in one environment."""

    def __init__(self, work: dict, environment: AppWorldEnvironments) -> None:
        self.work, self.environment = work, environment
        self.root, self.folder = Path(work["root"]), Path(work["folder"])
        self.listener = Listener(self.folder)
        ids = sorted(path.name for path in (self.root / "data" / "tasks").iterdir())
        self.tasks = {
            kind: [task for task in ids if words in self._instruction(task)] for kind, words in TASKS.items()
        }
        self.own = itertools.cycle(self.tasks["own"])
        self.lock = threading.Lock()

    def _instruction(self, task: str) -> str:
        return json.loads((self.root / "data" / "tasks" / task / "specs.json").read_text())["instruction"]

    def _values(self, task: str) -> str:
        values = {
            "ROOT": str(self.root),
            "TASK": task,
            "TRAINER": os.getpid(),
            "WORKSPACE": str(self.environment.machinery.workspace.path),
            "SECRET_FILE": str(self.folder / "secret"),
            "PORT": self.listener.port,
            "ADDRESS": self.listener.address,
            "SOLUTION": solution(self.root, task),
        }
        return assignments(values)

    def open_honest_episodes(self) -> Callable[[], list[str]]:
        """Open two honest episodes: one leaves a secret in its output, the other is still at work after all attempts.

        Returns a function that says, in the end, how the second episode was disturbed.
        """
        task = self.tasks["note"][-1]
        note = f"title='x', content={self.work['secrets']['episode']!r}"
        prelude = self._values(task) + PRELUDE
        for episode in (first := self.environment.open(task), second := self.environment.open(task)):
            episode.step(prelude)
        first.step(f"apis.simple_note.create_note({note}, access_token=login('simple_note'))")
        first.score()
        second.step("exec(SOLUTION)")

        def look() -> list[str]:
            found = []
            try:
                text, reward = second.step("print(TASK)").text, second.score().reward
                found = [repr(text)] * (text != f"{task}\n") + [f"reward {reward}"] * (reward != 1)
            except EnvironmentFault as error:
                found = [str(error)]
            first.close()
            second.close()
            return found

        return look

    def make(self, group: Sequence[Attack]) -> list[dict]:
        """Make attempts in one episode, which they share: one after the other, and one score in the end.

        Returns:
            For each, the `signs` that showed; `reward` (`None` after a fault); for each step its `text`, `failure` and
            `seconds`; `fault`; `completed`; and `seconds` of the whole.
        """
        started = time.monotonic()
        with self.lock:
            task = next(self.own) if group[0].task == "own" else self.tasks[group[0].task][0]
        scenes = [Scene(attack, self.folder) for attack in group]
        whole = {"task": task, "reward": None, "fault": None}
        try:
            with self.environment.open(task) as episode:
                self._play(episode, scenes, self._values(task) + PRELUDE, whole)
        except EnvironmentFault as error:
            whole["fault"] = f"{type(error).__name__}: {error}"
        whole["seconds"] = time.monotonic() - started
        return [scene.record | whole | {"signs": sorted(self._signs(scene, whole))} for scene in scenes]

    def _play(self, episode, scenes: "list[Scene]", prelude: str, whole: dict) -> None:
        goes_on = episode.step(prelude).failure is None
        for scene in scenes:
            for number, code in enumerate((*scene.attack.honest, *scene.attack.steps)):
                if goes_on:
                    started = time.monotonic()
                    result = episode.step(code if number else assignments(scene.values) + code)
                    scene.see(result, time.monotonic() - started)
                    goes_on = not result.ended
        time.sleep(max(scene.attack.wait_s for scene in scenes))
        started = time.monotonic()
        whole["reward"] = episode.score().reward
        whole["score_seconds"] = time.monotonic() - started

    def _signs(self, scene: "Scene", whole: dict) -> set[Sign]:
        texts = [step["text"] for step in scene.record["steps"]]
        logs = self.environment.machinery.workspace.path.glob("*.log")
        slow = [step["seconds"] > STEP_S + PATIENCE_S for step in scene.record["steps"]]
        name = scene.attack.id
        showed = {
            Sign.LEAK: any(secret in text for secret in self.work["secrets"].values() for text in texts),
            Sign.SAID: any("WORKED" in text.splitlines() for text in texts),
            Sign.TEXT: any(len(text) > MAX_OUTPUT + 100 for text in texts),
            Sign.LOOT: any(scene.loot.iterdir()),
            Sign.LOG: any(log.read_bytes().count(name.encode()) > MAX_MARKS for log in logs),
            Sign.VICTIM: scene.victim.poll() is not None,
            Sign.HEARD: any(name in line for line in self.listener.heard),
            Sign.LOST: whole["fault"] is not None,
            Sign.LATE: any(slow) or whole.get("score_seconds", 0) > SCORE_PATIENCE_S,
        }
        scene.close()
        return {sign for sign, shows in showed.items() if shows}


class Scene:
    """What belongs to one attempt alone: a folder, a process, and the record of its steps."""

    numbers = itertools.count(1)

    def __init__(self, attack: Attack, folder: Path) -> None:
        self.attack = attack
        self.loot = folder / f"loot-{next(self.numbers)}"
        self.loot.mkdir()
        self.loot.chmod(0o777)
        self.victim = subprocess.Popen(["/bin/sleep", "120"])
        self.values = {"LOOT": str(self.loot), "VICTIM": self.victim.pid}
        self.record = {"steps": [], "completed": False}

    def see(self, result, seconds: float) -> None:
        self.record["steps"].append({"text": result.text, "failure": result.failure, "seconds": seconds})
        self.record["completed"] |= result.completed

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()


def assignments(values: dict) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


def in_groups(attacks: list[Attack]) -> Iterator[tuple[Attack, ...]]:
    """Attempts that may share an episode, a few at a time, and the others alone; those that take long come first."""
    for attack in sorted(attacks, key=lambda attack: attack.kind not in SLOW):
        if attack.kind not in SHARED:
            yield (attack,)
    together = [attack for attack in attacks if attack.kind in SHARED]
    for first in range(0, len(together), GROUP):
        yield tuple(together[first : first + GROUP])


def digests(root: Path) -> dict[str, str]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    work = json.load(sys.stdin)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, attacks = Path(work["root"]), every_attack()
    chosen = [attacks[name] for name in work["attacks"]]
    before = digests(root)
    with open_environment(work) as environment:
        maker = Maker(work, environment.start())
        with ThreadPoolExecutor(PARALLEL) as pool:
            look = maker.open_honest_episodes()
            twins = {(attack.task, attack.honest): dataclasses.replace(attack, code=()) for attack in chosen}
            groups = [*((twin,) for twin in twins.values()), *in_groups(chosen)]
            made = [record for records in pool.map(maker.make, groups) for record in records]
            disturbed = look()
    rewards = dict(zip(twins, made, strict=False))
    in_order = [attack.id for group in groups[len(twins) :] for attack in group]
    records = dict(zip(in_order, made[len(twins) :], strict=True))
    for attack in chosen:
        honest, record = rewards[attack.task, attack.honest], records[attack.id]
        record["honest"] = honest["reward"]
        if record["reward"] is not None and record["reward"] != honest["reward"]:
            record["signs"].append(Sign.REWARD)
        if record["completed"] and not honest["completed"]:
            record["signs"].append(Sign.COMPLETED)
    after = digests(root)
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    print(json.dumps({"records": records, "changed": changed, "disturbed": disturbed, "folder": work["folder"]}))


if __name__ == "__main__":
    main()
