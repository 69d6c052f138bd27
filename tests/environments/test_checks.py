"""`check_environment` passes an environment that keeps the protocol and names what each broken one breaks."""

import contextlib
import io
import threading
import time
import traceback

import pytest

from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.environments.checks import EnvironmentCheckError, check_environment
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EpisodeFault, SetupError

OUTPUT = threading.local()


class ToyEpisode:
    """Runs code in a dictionary of its own."""

    def __init__(self, env, task_id):
        self.env, self.open, self.closed = env, True, False
        self.reset = ResetResult(task_id=task_id, seconds=0.0)
        self.globals = env.shared if env.broken == "isolation" else {}

    def step(self, code):
        if not self.open and not (self.env.broken == "close" and self.closed):
            raise EpisodeFault("closed")
        if not code.strip():
            return StepResult(text="no code", failure=FailureKind.NO_CODE)
        if "sum(range(9))" in code:
            time.sleep(1.5 if self.env.broken == "deadline" else 0.2)
            return StepResult(text="", failure=FailureKind.TIMEOUT, ended=True)
        with self.env.lock if self.env.broken == "steps side by side" else contextlib.nullcontext():
            return self.run(code)

    def run(self, code):
        printed = io.StringIO()
        scope = self.globals
        scope["print"] = lambda *args: printed.write(" ".join(map(str, args)) + "\n")
        if self.env.broken == "state between steps":
            scope.pop("kept", None)
        scope["hasattr"] = lambda owner, name: False
        try:
            exec(compile(code, "<code>", "exec"), scope)
        except SyntaxError as error:
            return StepResult(text=str(error), failure=FailureKind.SYNTAX)
        except Exception:
            return StepResult(text=traceback.format_exc(), failure=FailureKind.RUNTIME)
        text = printed.getvalue()
        if self.env.broken == "verdicts" and text.startswith("Execution failed"):
            return StepResult(text=text, failure=FailureKind.RUNTIME)
        if "random" in code:
            text = str(time.monotonic_ns()) if self.env.broken == "determinism" else "0.5"
        return StepResult(text=text, failure=None)

    def score(self):
        if not self.open:
            raise EpisodeFault("closed")
        self.open = self.env.broken == "score"
        return Score(passed=("a",), failed=("b",))

    def close(self):
        if not self.closed:
            self.closed, self.open = True, False
            if self.env.broken != "bound on open episodes":
                self.env.places.release()


class ToyEnvironment:
    max_episodes = 2
    step_timeout_s = 0.2

    def __init__(self, broken=""):
        self.broken, self.shared, self.lock = broken, {}, threading.Lock()
        self.places = threading.Semaphore(2)

    def open(self, task_id):
        if task_id != "task" and self.broken != "unknown task":
            raise SetupError(f"no task {task_id}")
        if self.broken != "bound on open episodes":
            assert self.places.acquire(timeout=30)
        name = "other" if self.broken == "reset" else task_id
        return ToyEpisode(self, name)

    def close(self):
        pass


def test_a_good_environment_passes_every_check():
    passed = check_environment(ToyEnvironment(), "task", deadline_slack_s=1.0)
    assert len(passed) == len(set(passed)) == 11 and "deadline" in passed


@pytest.mark.parametrize(
    "broken",
    [
        "reset",
        "verdicts",
        "state between steps",
        "isolation",
        "determinism",
        "steps side by side",
        "bound on open episodes",
        "score",
        "close",
        "unknown task",
        "deadline",
    ],
)
def test_each_breach_is_named(broken):
    with pytest.raises(EnvironmentCheckError) as raised:
        check_environment(ToyEnvironment(broken), "task", deadline_slack_s=1.0)
    lines = str(raised.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == [broken]


def test_an_environment_without_a_known_deadline_skips_that_check():
    env = ToyEnvironment()
    ToyEnvironment.step_timeout_s, kept = None, ToyEnvironment.step_timeout_s
    try:
        assert "deadline" not in check_environment(env, "task")
    finally:
        ToyEnvironment.step_timeout_s = kept
