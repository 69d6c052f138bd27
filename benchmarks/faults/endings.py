"""The end of a run that cannot go on: hosts die again and again, or the trainer is killed."""

import dataclasses
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.faults.judge import log_of_the_loop
from benchmarks.faults.leftovers import host_processes
from benchmarks.faults.scripts import Script, Scripts
from benchmarks.faults.trainer import make_trainer
from gvpo_trl import MultiTurnRollout
from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.faults import EnvironmentFault, EnvironmentsExhausted

RESTARTS = 1
GROUP = 4
PATIENCE_S = 20.0


class DyingHosts:
    """Environments whose hosts are killed before each episode once `dying` is set."""

    def __init__(self, environments: AppWorldEnvironments) -> None:
        self.environments = environments
        self.max_episodes = environments.max_episodes
        self.dying = False

    def open(self, task_id: str) -> Any:
        """Open an episode of the real environments, whose hosts may have been killed just before."""
        if self.dying:
            for keeper in self.environments.machinery.keepers:
                keeper.begin()
                keeper.host.process.kill()
        return self.environments.open(task_id)

    def prefetch(self, task_ids: Sequence[str]) -> None:
        """Open episodes in advance, as the real environments do."""
        self.environments.prefetch(task_ids)


class _DeathAfterFirstStep(TrainerCallback):
    def __init__(self, hosts: DyingHosts) -> None:
        self._hosts = hosts

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._hosts.dying = True


def training_stops(root: Path, folder: Path, task_id: str, **limits: Any) -> list[str]:
    """Train, and let the hosts die after the first step; the faults of how training ends, one line each."""
    book = Scripts(root, [task_id], "split")
    with AppWorldEnvironments(
        root, output_dir=folder, rehearse=False, max_restarts=RESTARTS, **limits
    ) as environments:
        dying = DyingHosts(environments)
        options = {"max_steps": 9, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True}
        trainer = make_trainer(root, folder / "trainer", book, MultiTurnRollout(dying), GROUP, **options)
        trainer.scripts = [Script(task_id, "solved"), *[Script(task_id, "declared")] * (GROUP - 1)]
        trainer.add_callback(_DeathAfterFirstStep(dying))
        try:
            with log_of_the_loop([]):
                trainer.train()
        except EnvironmentsExhausted as error:
            told = str(error)
        else:
            return ["training went on although its hosts died again and again"]
    wrong = [] if "times in a row; last cause: the " in told else [f"training stopped without the last cause: {told}"]
    # The step in which the hosts die may still end; its rows are then unscorable.
    checkpoint = Path(get_last_checkpoint(folder / "trainer"))
    steps = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step
    if steps != trainer.state.global_step:
        wrong.append(f"the last checkpoint is that of step {steps}, training came to {trainer.state.global_step}")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    current = trainer.model.state_dict()
    return wrong + [f"{name} differs in the checkpoint" for name in loaded if not loaded[name].equal(current[name])]


def hosts_that_never_become_ready(root: Path, folder: Path, task_id: str, **limits: Any) -> list[str]:
    """Open episodes of hosts that get no time to warm up; the faults of the errors, one line each."""
    told = []
    with AppWorldEnvironments(
        root, output_dir=folder, rehearse=False, max_restarts=RESTARTS, **limits
    ) as environments:
        for keeper in environments.machinery.keepers:
            keeper.launch = dataclasses.replace(keeper.launch, ready_timeout_s=0.2)
        for _ in range(RESTARTS + 2):
            try:
                environments.open(task_id).close()
            except EnvironmentFault as error:
                told.append(f"{type(error).__name__}: {error}")
    expected = [*["HostFault: the host was not ready after 0.2 s"] * (RESTARTS + 1), "EnvironmentsExhausted: "]
    wrong = [] if len(told) == len(expected) else [f"{len(told)} errors of {len(expected)}"]
    pairs = zip(told, expected, strict=False)
    return wrong + [f"{text!r} instead of {head!r}" for text, head in pairs if not text.startswith(head)]


TRAINER = """
    import threading, time
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    options = {{"rehearse": False, "output_dir": {folder!r}, "step_timeout_s": 60, "venv": {venv!r}}}
    environments = AppWorldEnvironments({root!r}, **options)
    episodes = [environments.open({task_id!r}) for _ in range(2)]
    for episode in episodes:
        threading.Thread(target=episode.step, args=("while True: pass",), daemon=True).start()
    time.sleep(0.3)
    print("ready", flush=True)
    time.sleep(600)
"""


def killed_trainer(root: Path, folder: Path, task_id: str, venv: Path | None = None, **_: Any) -> list[str]:
    """Kill a trainer in the middle of two steps; everything that outlives it, one line each."""
    values = {"root": str(root), "folder": str(folder), "task_id": task_id, "venv": venv and str(venv)}
    script = textwrap.dedent(TRAINER.format(**values))
    where = Path(__file__).resolve().parents[2]
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=where, stdout=subprocess.PIPE, text=True)
    try:
        if trainer.stdout.readline() != "ready\n":
            return ["the trainer that was to be killed did not come up"]
        alive = len(host_processes(trainer.pid))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    finally:
        trainer.kill()
        trainer.communicate()
    wrong = [] if alive == 6 else [f"{alive} processes instead of two hosts, two worlds and two interpreters"]
    deadline = time.monotonic() + PATIENCE_S
    while (left := host_processes(trainer.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    AppWorldEnvironments(root, output_dir=folder, venv=venv).close()  # deletes what the killed trainer left
    return wrong + [f"process {pid}" for pid in left] + [f"file {path}" for path in folder.iterdir()]


ENDINGS = {"stop": training_stops, "never-ready": hosts_that_never_become_ready, "killed-trainer": killed_trainer}
