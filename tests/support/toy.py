"""An environment without AppWorld that runs code in this process and raises faults where a test says so."""

import contextlib
import io
import threading
import time
from collections.abc import Callable

from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault
from gvpo_trl.rollout.types import Turn, TurnRequest


class ToyEnvironment:
    """An environment in which `done()` completes the task; by default `ok` passed tests and one failed test score it.

    Args:
        max_episodes: number of episodes that may be open at once.
        faults: is called with (number of the episode in order of opening, "open" | "step" | "score") and may raise.
        score: returns the score for the final namespace of the agent's code.
    """

    is_checked = True

    def __init__(
        self,
        max_episodes: int = 16,
        faults: Callable[[int, str], None] = lambda episode, place: None,
        score: Callable[[dict], Score] | None = None,
    ):
        self.max_episodes = max_episodes
        self.faults = faults
        self.score = score or (lambda space: Score(passed=("called",) * space.get("ok", 0), failed=("other",)))
        self.opened: list[ToyEpisode] = []
        self.live = self.most_live = 0
        self._lock = threading.Lock()

    def open(self, task_id: str) -> "ToyEpisode":
        with self._lock:
            number = len(self.opened)
            self.opened.append(None)
            self.live += 1
            self.most_live = max(self.most_live, self.live)
        try:
            self.faults(number, "open")
        except BaseException:
            self.live -= 1
            raise
        self.opened[number] = ToyEpisode(self, number, task_id)
        return self.opened[number]

    def close(self) -> None:
        for episode in self.opened:
            if episode is not None:
                episode.close()


class ToyEpisode:
    def __init__(self, environment: ToyEnvironment, number: int, task_id: str):
        self.environment, self.number = environment, number
        self.reset = ResetResult(task_id=task_id, seconds=0.0)
        self.space: dict = {"done": lambda: self.space.update(_done=True), "sleep": time.sleep}
        self.closed = False

    def step(self, code: str) -> StepResult:
        if self.closed:
            raise EpisodeFault("closed")
        self.environment.faults(self.number, "step")
        printed = io.StringIO()
        try:
            compiled = compile(code, "<agent>", "exec")
        except SyntaxError as error:
            return StepResult(text=f"Syntax error: {error.msg}", failure=FailureKind.SYNTAX)
        try:
            with contextlib.redirect_stdout(printed) if "print" in code else contextlib.nullcontext():
                exec(compiled, self.space)
        except Exception as error:
            return StepResult(text=f"{type(error).__name__}: {error}", failure=FailureKind.RUNTIME)
        return StepResult(
            text=printed.getvalue() or "Execution successful.", failure=None, completed="_done" in self.space
        )

    def score(self) -> Score:
        self.environment.faults(self.number, "score")
        return self.environment.score(self.space)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.environment.live -= 1


class Scripted:
    """A `Generate` that plays fixed turns: `turns[row][n]` is the text of a row's n-th turn. The last one repeats."""

    def __init__(self, tokenizer, turns: dict[int, list[str]], end: str = "<|im_end|>"):
        self.tokenizer, self.turns, self.end = tokenizer, turns, end
        self.taken: dict[int, int] = {}
        self.calls: list[list[TurnRequest]] = []

    def __call__(self, requests):
        self.calls.append(list(requests))
        turns = []
        for request in requests:
            script = self.turns[request.trajectory]
            number = self.taken.get(request.trajectory, 0)
            self.taken[request.trajectory] = number + 1
            text = script[min(number, len(script) - 1)] + self.end
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: request.max_new_tokens]
            turns.append(Turn(ids=ids))
        return turns
