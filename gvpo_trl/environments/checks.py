"""`check_environment`: a conformance test for any environment, in the spirit of Gymnasium's `check_env`.

It opens episodes, runs small pieces of code in them and checks the results: verdicts, isolation, deadlines, and the
faults after an episode's end. The code is Python unless the caller gives `Snippets` of another language.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gvpo_trl.environments.base import Environment, Episode, Score
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault, SetupError

BUSY = "import time\nstart = time.clock_gettime(time.CLOCK_MONOTONIC)\n"
BUSY += "while time.clock_gettime(time.CLOCK_MONOTONIC) - start < {seconds}:\n    pass"
"""Code that keeps an interpreter busy for some seconds of the one clock that AppWorld does not freeze."""

ENDLESS = "while True:\n    try:\n        while True:\n            sum(range(9))\n    except Exception:\n        pass"
"""Code that never ends and that swallows the exception that should interrupt it."""

VERDICTS: dict[str, FailureKind | None] = {
    "print(6 * 7)": None,
    "print('Execution failed. Traceback:')": None,
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print('caught')": None,
    "1 / 0": FailureKind.RUNTIME,
    "undefined_name": FailureKind.RUNTIME,
    "raise Exception('Response status code is 409:')": FailureKind.RUNTIME,
    "value = (": FailureKind.SYNTAX,
    "": FailureKind.NO_CODE,
    " \n ": FailureKind.NO_CODE,
}
"""Snippets, and the failure kind that each must get; `None` for a success."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippets:
    """The code that the checks run, in the language of an environment."""

    verdicts: dict[str, FailureKind | None]
    """Pieces of code, and the failure kind that each must get; `None` for a success."""
    shows_42: str
    """Code that shows 42."""
    keeps: tuple[str, str, str] | None
    """Code that keeps a value, code that fails, and code that then shows 42 by means of the value.

    `None` if the steps of an episode share no state."""
    leaks: tuple[str, str, str] | None
    """Code of one episode that tries to change another one, and two pieces of code of the other one.

    The first of them shows `True` if the change worked, the second must fail at run time. `None` if the steps of an
    episode share no state."""
    random: str
    """Code whose output must be the same in each episode."""
    busy: str
    """Code that executes, and is busy for about a second and a half."""
    endless: str
    """Code that never ends."""


PYTHON = Snippets(
    verdicts=VERDICTS,
    shows_42="print(6 * 7)",
    keeps=("kept = 41\ndef more():\n    return kept + 1", "1 / 0", "print(more())"),
    leaks=(
        "mine = 1\nimport builtins\nbuiltins.leak = 1",
        "print('mine' in globals(), hasattr(__import__('builtins'), 'leak'))",
        "mine",
    ),
    random="import random\nprint(random.random())",
    busy=BUSY.format(seconds=1.5),
    endless=ENDLESS,
)


class EnvironmentCheckError(AssertionError):
    """An environment breaks the protocol; the message lists all checks that failed."""


def check_environment(
    env: Environment,
    task_id: str,
    *,
    step_timeout_s: float | None = None,
    deadline_slack_s: float = 2.0,
    snippets: Snippets = PYTHON,
) -> list[str]:
    """Check that an environment keeps the protocol of `environments.base`.

    Args:
        env: the environment, with room for two episodes at once. It stays open.
        task_id: a task, which is opened many times.
        step_timeout_s: the environment's deadline for a step; by default its attribute of that name. The deadline is
            not checked where neither is given.
        deadline_slack_s: how many seconds a step may take beyond its deadline.
        snippets: the code to run.

    Returns:
        The names of the checks that passed.

    Raises:
        EnvironmentCheckError: a check failed; the message has one line for each failed check.
    """
    timeout_s = step_timeout_s or getattr(env, "step_timeout_s", None)
    checks = _Checks(env, task_id, timeout_s, deadline_slack_s, snippets)
    passed, failed = [], []
    for name, check in checks.all().items():
        try:
            check()
            passed.append(name)
        except Exception as error:
            failed.append(f"{name}: {error or type(error).__name__}")
    if failed:
        raise EnvironmentCheckError(
            "\n".join([f"{len(failed)} of {len(failed) + len(passed)} checks failed", *failed])
        )
    return passed


class _Checks:
    def __init__(
        self, env: Environment, task_id: str, timeout_s: float | None, slack_s: float, snippets: Snippets
    ) -> None:
        self.env, self.task_id, self.timeout_s, self.slack_s = env, task_id, timeout_s, slack_s
        self.snippets = snippets

    def all(self) -> dict[str, Callable[[], None]]:
        checks = {
            "reset": self.reset,
            "verdicts": self.verdicts,
            "determinism": self.determinism,
            "steps side by side": self.side_by_side,
            "bound on open episodes": self.bound,
            "score": self.score,
            "close": self.close,
            "unknown task": self.unknown_task,
        }
        if self.snippets.keeps:
            checks["state between steps"] = self.state
        if self.snippets.leaks:
            checks["isolation"] = self.isolation
        return checks if self.timeout_s is None else checks | {"deadline": self.deadline}

    def run(self, body: Callable[[Episode], None]) -> None:
        episode = self.env.open(self.task_id)
        try:
            body(episode)
        finally:
            episode.close()

    def reset(self) -> None:
        def body(episode: Episode) -> None:
            _expect(episode.reset.task_id == self.task_id, f"reset.task_id is {episode.reset.task_id!r}")
            _expect(episode.reset.seconds >= 0, f"reset.seconds is {episode.reset.seconds}")

        self.run(body)

    def verdicts(self) -> None:
        def body(episode: Episode) -> None:
            for code, kind in self.snippets.verdicts.items():
                result = episode.step(code)
                _expect(isinstance(result.text, str), f"{code!r} gave no text")
                _expect(result.failure == kind, f"{code!r} gave {result.failure!r} instead of {kind!r}: {result.text}")
                _expect(not result.completed and not result.ended, f"{code!r} completed or ended the episode")
            _expect("42" in episode.step(self.snippets.shows_42).text, "the printed text does not come back")

        self.run(body)

    def state(self) -> None:
        def body(episode: Episode) -> None:
            keep, fail, show = self.snippets.keeps
            episode.step(keep)
            episode.step(fail)
            _expect("42" in episode.step(show).text, "a variable is gone in the next step")

        self.run(body)

    def isolation(self) -> None:
        def body(first: Episode) -> None:
            def inner(second: Episode) -> None:
                leak, show, fail = self.snippets.leaks
                first.step(leak)
                result = second.step(show)
                _expect("True" not in result.text, "an episode sees what another one defined")
                _expect(second.step(fail).failure is FailureKind.RUNTIME, "an episode sees another one's variables")

            self.run(inner)

        self.run(body)

    def determinism(self) -> None:
        def play() -> tuple[list[tuple], tuple]:
            episode = self.env.open(self.task_id)
            try:
                results = [episode.step(code) for code in [*self.snippets.verdicts, self.snippets.random]]
                score = episode.score()
            finally:
                episode.close()
            return [(r.text, r.failure, r.completed, r.ended, r.api_calls) for r in results], (
                score.passed,
                score.failed,
            )

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: play(), range(2))
        _expect(first == second, f"two episodes with the same steps differ: {first} and {second}")

    def side_by_side(self) -> None:
        def body(slow: Episode) -> None:
            def inner(quick: Episode) -> None:
                with ThreadPoolExecutor(1) as pool:
                    running = pool.submit(slow.step, self.snippets.busy)
                    time.sleep(0.2)
                    quick.step(self.snippets.shows_42)
                    _expect(not running.done(), "a slow step held up another episode's step")
                    _expect(running.result().failure is None, "the slow step failed")

            self.run(inner)

        self.run(body)

    def bound(self) -> None:
        with ThreadPoolExecutor(self.env.max_episodes) as pool:
            episodes = list(pool.map(lambda _: self.env.open(self.task_id), range(self.env.max_episodes)))
        late: list[Episode] = []
        waiter = threading.Thread(target=lambda: late.append(self.env.open(self.task_id)), daemon=True)
        waiter.start()
        waiter.join(0.5)
        early = list(late)
        for episode in episodes:
            episode.close()
        waiter.join(60)
        for episode in late:
            episode.close()
        _expect(not early, f"more than max_episodes={self.env.max_episodes} were open")
        _expect(bool(late), "the waiting `open` did not go through after others were closed")

    def score(self) -> None:
        def body(episode: Episode) -> None:
            episode.step(self.snippets.shows_42)
            score = episode.score()
            _expect(isinstance(score, Score) and score.passed + score.failed != (), "a score without any test")
            _expect(0 <= score.reward <= 1, f"reward {score.reward}")
            _raises(EnvironmentFault, lambda: episode.step(self.snippets.shows_42), "a step after the score")

        self.run(body)

    def close(self) -> None:
        episode = self.env.open(self.task_id)
        episode.close()
        episode.close()
        _raises(EnvironmentFault, lambda: episode.step(self.snippets.shows_42), "a step after close")
        _raises(EnvironmentFault, episode.score, "a score after close")

    def unknown_task(self) -> None:
        _raises(SetupError, lambda: self.env.open("no such task").close(), "an unknown task")

    def deadline(self) -> None:
        def body(episode: Episode) -> None:
            started = time.monotonic()
            result = episode.step(self.snippets.endless)
            seconds = time.monotonic() - started
            _expect(result.failure is FailureKind.TIMEOUT, f"an endless loop gave {result.failure!r}")
            _expect(
                seconds < self.timeout_s + self.slack_s,
                f"a step with a deadline of {self.timeout_s} s took {seconds:.1f}",
            )
            _expect(isinstance(episode.score(), Score), "no score after a time-out")

        self.run(body)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise EnvironmentCheckError(message)


def _raises(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise EnvironmentCheckError(f"{what} raised no {kind.__name__}")
