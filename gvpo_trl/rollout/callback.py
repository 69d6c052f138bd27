"""`MultiTurnRollout`, the function that TRL calls as `rollout_func`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gvpo_trl.environments.base import Environment
from gvpo_trl.rollout.budgets import OBSERVATION_TEMPLATE, Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.packing import pack
from gvpo_trl.rollout.prefetch import Prefetch
from gvpo_trl.rollout.seam import RolloutContext, RolloutSeconds, RolloutTrainer
from gvpo_trl.rollout.types import Trajectory

_BUDGETS = ("max_turns", "max_turn_length", "max_observation_length")


class MultiTurnRollout:
    """Runs multi-turn trajectories in an environment that executes the agent's code and says which steps failed.

    Pass it as `rollout_func` to [`GVPOTrainer`]. A budget that is given here replaces that of the trainer's
    `GVPOConfig`.

    Args:
        environments: opens one episode per trajectory, for example `AppWorldEnvironments`.
        max_turns: the most turns of a trajectory.
        max_turn_length: the most sampled tokens of a turn.
        max_observation_length: the most tokens of an observation.
        observation_template: text of the user message with an observation; must hold `{observation}`.
        straggler_s: how long a round waits for its slowest step before the others go on without it, in seconds.
        overlap: whether the next turns of one half of the trajectories are sampled while the code of the other half
            runs. This pays off if a step takes long and half a batch is sampled in clearly less time than a whole one.
            Otherwise the smaller batches cost more time than the waiting.

    With vLLM there are no rounds, because each trajectory asks for its next turn as soon as its code has run.
    `straggler_s` and `overlap` then have no effect.

    Raises:
        ValueError: a budget is less than 1, `straggler_s` is negative, or the template has no `{observation}`.
    """

    def __init__(
        self,
        environments: Environment,
        *,
        max_turns: int | None = None,
        max_turn_length: int | None = None,
        max_observation_length: int | None = None,
        observation_template: str = OBSERVATION_TEMPLATE,
        straggler_s: float = 2.0,
        overlap: bool = False,
    ):
        self.environments = environments
        given = (max_turns, max_turn_length, max_observation_length)
        self._given = {name: value for name, value in zip(_BUDGETS, given, strict=True) if value is not None}
        for name, value in self._given.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if "{observation}" not in observation_template:
            raise ValueError(f"observation_template={observation_template!r} must hold {{observation}}.")
        if straggler_s < 0:
            raise ValueError(f"straggler_s={straggler_s} must be >= 0.")
        self.observation_template = observation_template
        self.straggler_s = straggler_s
        self.overlap = overlap
        self.prefetch = Prefetch(environments)

    def budgets(self, context: RolloutContext) -> Budgets:
        """Return the limits of a trajectory: those given to this rollout, and otherwise the trainer's."""
        values = {name: getattr(context, name) for name in _BUDGETS}
        return Budgets(
            **(values | self._given),
            max_completion_length=context.max_completion_length,
            max_context_length=context.max_context_length,
            no_code_is_failure=context.no_code_is_failure,
            caught_api_errors_fail=context.caught_api_errors_fail,
            observation_template=self.observation_template,
            straggler_s=self.straggler_s,
            overlap=self.overlap,
        )

    def __call__(self, prompts: Sequence[list[dict[str, Any]]], trainer: RolloutTrainer) -> dict[str, Any]:
        """Attempt each prompt's task once, and return what TRL expects from a `rollout_func`, with extra fields.

        Each field is a list with one value per prompt, in the order of the prompts. Only `logprobs` is `None` if any
        turn has none.

        Args:
            prompts: (B,) conversational prompts, already repeated `num_generations` times.
            trainer: the `GVPOTrainer`, whose context holds the rows that the prompts belong to.

        Raises:
            ValueError: a row has no `task_id`.
        """
        context = trainer.rollout_context()
        task_ids = [row.get("task_id") for row in context.rows]
        if None in task_ids:
            raise ValueError("The dataset has no column 'task_id'; make it with load_tasks, or add the column.")
        trajectories = self.attempt(task_ids, prompts, context, dates=[row.get("datetime") for row in context.rows])
        if context.is_training:
            self.prefetch.rolled_out(task_ids)
        return self._rows(trajectories, context)

    def attempt(
        self,
        task_ids: Sequence[str],
        prompts: Sequence[list[dict[str, Any]]],
        context: RolloutContext,
        *,
        dates: Sequence[str | None] | None = None,
        in_metrics: bool = True,
        rows: Sequence[int] | None = None,
        ended: Callable[[int, Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Attempt each task once with the trainer's current model, write the traces, and return the trajectories.

        Args:
            task_ids: (B,) ids of the tasks.
            prompts: (B,) conversational prompts.
            context: what the trainer provides (`GVPOTrainer.rollout_context()`).
            dates: (B,) each task's date and time in ISO format, for templates that write today's date.
            in_metrics: whether the trajectories count in the metrics of the trainer's next log.
            rows: (B,) the number of each task among those of all processes, which the seeds of its turns depend on; by
                default the tasks follow each other.
            ended: is called in this thread with the position of each attempt that has ended, and its trajectory.
        """
        chat = Chat(
            context.tokenizer,
            context.end_ids,
            template=context.chat_template,
            template_kwargs=context.chat_template_kwargs,
        )
        streams = context.streams()
        streams = streams if rows is None else replace(streams, rows=tuple(rows))
        loop = RolloutLoop(self.environments, chat, self.budgets(context), streams)
        started = time.perf_counter()
        with context.generation_session(sorted(chat.end_ids)) as generate:
            trajectories = loop.run(task_ids, prompts, generate, dates, ended)
        clock = loop.clock
        seconds = RolloutSeconds(
            generate=clock.generate_s,
            environment=time.perf_counter() - started - clock.generate_s,
            overlap=clock.overlap_s,
            reset_wait=clock.reset_wait_s,
        )
        context.record(trajectories, seconds, in_metrics)
        return trajectories

    @staticmethod
    def _rows(trajectories: list[Trajectory], context: RolloutContext) -> dict[str, Any]:
        rows = [
            pack(
                trajectory,
                filler_id=context.end_ids[0],
                failure_span=context.failure_span,
                masked=context.mask_truncated_completions and trajectory.stop.is_truncated,
                no_code=context.no_code,
            )
            for trajectory in trajectories
        ]
        scores = [trajectory.score for trajectory in trajectories]
        has_logprobs = all(row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows] if has_logprobs else None,
            "env_mask": [row.env_mask for row in rows],
            "failed_mask": [row.failed_mask for row in rows],
            "trajectory": trajectories,
            "passed_tests": [None if score is None else list(score.passed) for score in scores],
            "failed_tests": [None if score is None else list(score.failed) for score in scores],
            "failed_steps": [sum(step.failure is not None for step in t.steps) for t in trajectories],
            "turns": [len(trajectory.steps) for trajectory in trajectories],
        }
