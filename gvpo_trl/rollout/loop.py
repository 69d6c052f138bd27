"""The rollout loop: reset -> generate -> extract code -> step -> … -> score. This is the main path; read it first.

The loop keeps an `_Attempt` for every live trajectory. A round samples one turn for each attempt that is ready, runs
the code of these turns at the same time (in one thread per episode; the episodes are separate processes), and ends the
attempts that are done. A world opens while the attempt's first turn is sampled. A waiting task starts as soon as
another attempt ends. A round does not wait for a step that takes longer than `straggler_s`. With `overlap`, a round
begins as soon as half of the live attempts are ready, so the code of one half runs while the turns of the other half
are sampled. With a `StreamingGenerate` (vLLM) there are no rounds: the loop requests an attempt's next turn as soon as
its code has run.

The loop keeps two kinds of failure apart. The `failure` of a step is the agent's: it is data and shapes the advantage.
An `EnvironmentFault` is ours: the attempt starts once more on a fresh episode, and if that one breaks as well, the
trajectory is unscorable.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from gvpo_trl.environments.base import Environment, Episode, Score, StepResult
from gvpo_trl.environments.interface import checked_episode, checked_score, checked_step
from gvpo_trl.failures import classify_step
from gvpo_trl.faults import EnvironmentFault, EnvironmentsExhausted, GenerationFault
from gvpo_trl.rollout.batches import BatchStream
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.clock import Clock
from gvpo_trl.rollout.code import PYTHON, extract_code
from gvpo_trl.rollout.statement import statement_spans
from gvpo_trl.rollout.streams import Streams
from gvpo_trl.rollout.types import Generate, Step, StopReason, StreamingGenerate, Trajectory, Turn, TurnRequest
from gvpo_trl.text import brief, spelled_out

logger = logging.getLogger(__name__)

NO_CODE_OBSERVATION = (
    "No code was found in your turn. Write one block that begins with ```{language} and ends with ```."
)


@dataclass(slots=True)
class _Attempt:
    """A trajectory that is not finished yet. Its futures are the work that the generator and the threads do for it."""

    row: int
    task_id: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    retries: int = 0
    fault: str | None = None
    steps: list[Step] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    opening: Future[Episode] | None = None
    sampling: Future[Turn] | None = None
    requested_at: float = 0.0
    """The value of `perf_counter` when the turn was requested."""
    stepping: Future[StepResult] | None = None
    step_started: float = 0.0
    """The value of `perf_counter` when the step was handed to its thread."""
    opened_at: float = 0.0
    """The value of `perf_counter` when the world was open."""
    scoring: Future[Score] | None = None
    score: Score | None = None
    pending: Step | None = None
    """The step whose code is running; its observation is not known yet."""
    stop: StopReason | None = None

    def step_deadline(self, straggler_s: float) -> float:
        """Return the value of `perf_counter` after which a round does not wait for the step.

        A step waits for its world first, and that wait does not count.
        """
        is_open = self.opening is not None and self.opening.done()
        return max(self.step_started, self.opened_at) + straggler_s if is_open else float("inf")

    @property
    def needs_turn(self) -> bool:
        """Whether the next turn can be requested now."""
        return self.stop is None and self.sampling is None and self.stepping is None

    def restart(self, fault: EnvironmentFault) -> None:
        """Forget every step, so that the attempt begins again with a fresh episode."""
        self.retries += 1
        self.fault = _describe(fault)
        self.steps, self.ids = [], list(self.prompt_ids)
        self.opening = self.stepping = self.scoring = self.pending = self.stop = None


class RolloutLoop:
    """Runs attempts at tasks to their end.

    Args:
        environment: opens episodes; at most `max_episodes` attempts are live at once. Its attribute `languages`, if it
            has one, holds the labels of fenced blocks that are code.
        chat: the tokenizer's chat template.
        budgets: the limits of a trajectory.
        streams: the seeds of the turns; without it the generator chooses them.
    """

    def __init__(self, environment: Environment, chat: Chat, budgets: Budgets, streams: Streams | None = None):
        self.environment = environment
        self.chat = chat
        self.budgets = budgets
        self.streams = streams
        self.languages: Sequence[str] = getattr(environment, "languages", PYTHON)
        self.clock = Clock()
        self._pool: ThreadPoolExecutor

    def run(
        self,
        task_ids: Sequence[str],
        prompts: Sequence[list[dict[str, Any]]],
        generate: Generate | StreamingGenerate,
        dates: Sequence[str | None] | None = None,
        ended: Callable[[int, Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Attempt every row's task once and return the trajectories in the order of the rows.

        Args:
            task_ids: one task per row.
            prompts: one list of messages per row.
            generate: samples the turns.
            dates: one date per row in ISO format, which a chat template may write into the prompt; `None` if unknown.
            ended: is called in this thread with the row and the trajectory of each attempt that has ended.

        Raises:
            ValueError: a prompt leaves no room for a turn.
            EnvironmentsExhausted: the environment cannot open episodes any more. Every open episode is closed first.
        """
        tasks = zip(task_ids, prompts, dates or [None] * len(task_ids), strict=True)
        attempts = [self._attempt(row, *task) for row, task in enumerate(tasks)]
        waiting, live = deque(attempts), []
        stream = generate if isinstance(generate, StreamingGenerate) else BatchStream(generate)
        with ThreadPoolExecutor(2 * self.environment.max_episodes, thread_name_prefix="episode") as self._pool:
            try:
                while waiting or live:
                    while waiting and len(live) < self.environment.max_episodes:
                        live.append(waiting.popleft())
                    for attempt in live:
                        if attempt.needs_turn:
                            self._request_turn(attempt, stream)
                    busy = stream.advance()
                    self._start_steps(live)
                    self._collect(live, busy, in_rounds=stream is not generate)
                    over = [attempt for attempt in live if attempt.stop is not None and attempt.scoring is None]
                    live = [attempt for attempt in live if attempt not in over]
                    for attempt in over if ended else ():
                        ended(attempt.row, self._finish(attempt))
                return [self._finish(attempt) for attempt in attempts]
            finally:
                for attempt in attempts:
                    _close(attempt)

    def _attempt(self, row: int, task_id: str, messages: list[dict[str, Any]], date: str | None) -> _Attempt:
        prompt_ids = self.chat.prompt_ids(messages, date)
        if self.budgets.room(len(prompt_ids)) < 1:
            raise ValueError(
                f"The prompt of task {task_id} has {len(prompt_ids)} tokens, which leaves no room in "
                f"max_context_length={self.budgets.max_context_length}; raise it or use a shorter prompt."
            )
        return _Attempt(row, task_id, messages, prompt_ids, ids=list(prompt_ids))

    def _request_turn(self, attempt: _Attempt, stream: StreamingGenerate) -> None:
        """Request the attempt's next turn, and open its world if it has none."""
        if attempt.opening is None:
            attempt.opening = self._pool.submit(self._open, attempt)
        attempt.requested_at = time.perf_counter()
        attempt.sampling = stream.submit(
            TurnRequest(
                trajectory=attempt.row,
                ids=attempt.ids,
                max_new_tokens=self._turn_length(attempt),
                seed=self.streams.seed(attempt.row, len(attempt.steps)) if self.streams else None,
            )
        )

    def _start_steps(self, live: list[_Attempt]) -> None:
        """Start to run the code of each turn that has been sampled."""
        for attempt in live:
            if attempt.sampling is None or not attempt.sampling.done():
                continue
            future, attempt.sampling = attempt.sampling, None
            self.clock.add("generate", attempt.requested_at)
            try:
                turn = future.result()
            except GenerationFault as fault:
                self._retry_or_abandon(attempt, fault)
                continue
            length = len(turn.ids)
            assert 0 < length <= self._turn_length(attempt), "a turn is never empty and never over its budget"
            self._start_step(attempt, turn, time.perf_counter() - attempt.requested_at)

    def _start_step(self, attempt: _Attempt, turn: Turn, seconds: float) -> None:
        text = turn.text if turn.text is not None else self.chat.text(turn.ids)
        code = extract_code(text, languages=self.languages)
        attempt.pending = Step(
            action_ids=turn.ids,
            action_logprobs=turn.logprobs,
            bridge_ids=[],
            text=text,
            code=code.source if code else None,
            code_spans=self.chat.token_spans(turn.ids, code) if code else (),
            observation="",
            failure=None,
            generate_s=seconds,
        )
        attempt.ids = attempt.ids + turn.ids
        attempt.stepping = self._pool.submit(self._step, attempt.opening, attempt.pending.code)
        attempt.step_started = time.perf_counter()

    def _collect(self, live: list[_Attempt], busy: bool, in_rounds: bool) -> None:
        """Take in the steps and scores that are done.

        Args:
            live: all attempts that have not ended.
            busy: whether the generator needs this thread; the call then returns at once.
            in_rounds: whether turns are sampled in batches. Large batches are faster, so the call then waits for every
                step that can still end before its deadline (with `overlap`, until half of the attempts are ready).
        """
        sampling = [attempt.sampling for attempt in live if attempt.sampling is not None]
        stepping = {attempt.stepping: attempt for attempt in live if attempt.stepping is not None}
        scoring = {attempt.scoring: attempt for attempt in live if attempt.scoring is not None}
        wait([*sampling, *stepping, *scoring], timeout=0 if busy else None, return_when=FIRST_COMPLETED)
        enough = max(1, len(live) // 2) if self.budgets.overlap else len(stepping)
        while in_rounds and sum(future.done() for future in stepping) < enough:
            now, late = time.perf_counter(), self.budgets.straggler_s
            left = {f: a.step_deadline(late) - now for f, a in stepping.items() if not f.done()}
            left = {future: seconds for future, seconds in left.items() if seconds > 0}
            if not left:
                break
            opening = [stepping[future].opening for future, seconds in left.items() if seconds == float("inf")]
            deadlines = [seconds for seconds in left.values() if seconds < float("inf")]
            wait([*left, *opening], timeout=max(deadlines, default=None), return_when=FIRST_COMPLETED)
        for future, attempt in stepping.items():
            if future.done():
                self._end_step(attempt, future)
        for future, attempt in scoring.items():
            if future.done():
                self._end_attempt(attempt, future)

    def _end_step(self, attempt: _Attempt, future: Future[StepResult]) -> None:
        attempt.stepping = None
        try:
            result = future.result()
        except EnvironmentFault as fault:
            self._retry_or_abandon(attempt, fault)
            return
        failure = classify_step(
            code=attempt.pending.code,
            verdict=result.failure,
            no_code_is_failure=self.budgets.no_code_is_failure,
            caught_api_errors=len(result.api_errors) if self.budgets.caught_api_errors_fail else 0,
        )
        observation = self.chat.cut(result.text, self.budgets.max_observation_length)
        message = self.budgets.observation_template.replace("{observation}", observation)
        bridge_ids = self.chat.bridge(attempt.pending.action_ids, message)
        attempt.stop = self._stop_reason(attempt, result, len(bridge_ids))
        attempt.steps.append(
            replace(
                attempt.pending,
                bridge_ids=bridge_ids if attempt.stop is None else [],
                observation=message,
                failure=failure,
                statement_spans=statement_spans(self.chat, attempt.pending, result.failed_line),
                api_calls=result.api_calls,
                api_errors=result.api_errors,
                execute_s=result.seconds,
            )
        )
        attempt.pending = None
        if attempt.stop is not None:
            attempt.scoring = self._pool.submit(self._score, attempt.opening.result())
        else:
            attempt.ids = attempt.ids + bridge_ids

    def _end_attempt(self, attempt: _Attempt, future: Future[Score]) -> None:
        attempt.scoring = None
        try:
            attempt.score = future.result()
        except EnvironmentFault as fault:
            self._retry_or_abandon(attempt, fault)

    def _stop_reason(self, attempt: _Attempt, result: StepResult, bridge_length: int) -> StopReason | None:
        if result.completed:
            return StopReason.COMPLETED
        if result.ended:
            return StopReason.AGENT_EXITED
        if len(attempt.steps) + 1 >= self.budgets.max_turns:
            return StopReason.MAX_TURNS
        if self._room(attempt) - bridge_length < 1:
            return StopReason.MAX_TOKENS
        return None

    def _turn_length(self, attempt: _Attempt) -> int:
        """Return how many tokens the attempt's next turn may have."""
        return min(self.budgets.max_turn_length, self._room(attempt))

    def _room(self, attempt: _Attempt) -> int:
        """Return by how many tokens the trajectory may still grow."""
        return self.budgets.room(len(attempt.prompt_ids)) - (len(attempt.ids) - len(attempt.prompt_ids))

    def _retry_or_abandon(self, attempt: _Attempt, fault: EnvironmentFault) -> None:
        """Start the attempt again on a fresh episode, or end its trajectory as unscorable."""
        if isinstance(fault, EnvironmentsExhausted):
            raise fault
        logger.warning("Task %s, attempt %d: %s", attempt.task_id, attempt.retries + 1, brief(_describe(fault)))
        _close(attempt)
        if attempt.retries < self.budgets.max_retries:
            attempt.restart(fault)
        else:
            attempt.fault = _describe(fault)
            attempt.stop = StopReason.ENVIRONMENT_LOST
            if attempt.steps:  # A trajectory never ends on an observation.
                attempt.steps[-1] = replace(attempt.steps[-1], bridge_ids=[])

    # The following methods run in the threads of the pool.

    def _open(self, attempt: _Attempt) -> Episode:
        with self.clock.running("environment"):
            episode = checked_episode(self.environment.open(attempt.task_id), type(self.environment).__name__)
        attempt.opened_at = time.perf_counter()
        return episode

    def _step(self, opening: Future[Episode], code: str | None) -> StepResult:
        with self.clock.running("reset"):
            episode = opening.result()
        if code is None:
            return StepResult(text=NO_CODE_OBSERVATION.format(language=self.languages[0]), failure=None)
        started = time.perf_counter()
        with self.clock.running("environment"):
            result = checked_step(episode.step(code), type(episode).__name__)
        seconds = time.perf_counter() - started
        return replace(result, api_calls=tuple(map(spelled_out, result.api_calls)), seconds=seconds)

    def _score(self, episode: Episode) -> Score:
        started = time.perf_counter()
        with self.clock.running("environment"):
            try:
                score = checked_score(episode.score(), type(episode).__name__)
            finally:
                _close_episode(episode)
        passed, failed = (tuple(map(spelled_out, texts)) for texts in (score.passed, score.failed))
        return replace(score, passed=passed, failed=failed, seconds=time.perf_counter() - started)

    def _finish(self, attempt: _Attempt) -> Trajectory:
        opened = attempt.opening is not None and attempt.opening.exception() is None
        return Trajectory(
            task_id=attempt.task_id,
            messages=attempt.messages,
            prompt_ids=attempt.prompt_ids,
            steps=attempt.steps,
            stop=attempt.stop,
            score=attempt.score,
            reset_s=attempt.opening.result().reset.seconds if opened else 0.0,
            score_s=attempt.score.seconds if attempt.score else 0.0,
            retries=attempt.retries,
            fault=attempt.fault,
        )


def _close(attempt: _Attempt) -> None:
    """Close the attempt's episode, if one is open or opening."""
    if attempt.opening is not None and (attempt.opening.cancel() or attempt.opening.exception() is not None):
        return
    if attempt.opening is not None:
        _close_episode(attempt.opening.result())


def _close_episode(episode: Episode) -> None:
    """Close an episode. A fault while closing is only logged, so that the score is kept and other episodes close."""
    try:
        episode.close()
    except EnvironmentFault as fault:
        logger.warning("An episode of task %s was not closed: %s", episode.reset.task_id, brief(_describe(fault)))


def _describe(fault: EnvironmentFault) -> str:
    return spelled_out(f"{fault.boundary}: {fault}")
