"""`MultiTurnTrainer`: TRL's `GRPOTrainer` with what a rollout of several turns needs of a trainer.

It opens generators, numbers the rollouts' random streams, writes traces and collects metrics. It overrides nothing of
TRL's but the constructor; the method is in `trainer.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from gvpo_trl.generation.ranks import needs_equal_forwards
from gvpo_trl.generation.sampling import greedy
from gvpo_trl.generation.transformers import ModelSource, transformers_session
from gvpo_trl.generation.vllm import EngineSource, engine_context_length, vllm_session
from gvpo_trl.reporting.traces import FOLDER, TraceWriter
from gvpo_trl.rollout.seam import OPTIONS, RolloutContext, RolloutSeconds
from gvpo_trl.rollout.streams import Streams
from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory
from gvpo_trl.training import metrics
from gvpo_trl.training.evaluations import Evaluation
from gvpo_trl.training.tool_calls import ToolWatch


@dataclass(slots=True)
class Call:
    """State of one call of `_generate_and_score_completions` while it runs."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """(B,) the data set's rows of the batch; TRL passes only their prompts to the rollout."""
    rewards: torch.Tensor | None = None
    """(B over all ranks, reward functions) unweighted rewards, NaN where a function gave none."""
    watch: ToolWatch | None = None
    """The verdicts of TRL's own tool loop, which runs the trajectories where there is no `rollout_func`."""


class MultiTurnTrainer(GRPOTrainer):
    """TRL's trainer as a rollout sees it. The arguments are those of [`~trl.GRPOTrainer`]."""

    def __init__(self, model, reward_funcs, args, *arguments, **kwargs):
        self._call = Call()
        self._rollouts: tuple[Any, int] = (None, 0)  # mode and step of the last rollout, and how many it had before
        self._evaluation: Evaluation | None = None
        self._engine_context_length: int | None = None
        self._traces = TraceWriter(Path(args.output_dir) / FOLDER, rank=args.process_index)
        super().__init__(model, reward_funcs, args, *arguments, **kwargs)

    # What the rollout needs from the trainer

    @property
    def tokenizer(self):
        """The text tokenizer, which is part of the processor where a model has one."""
        return self._tokenizer

    def rollout_context(self) -> RolloutContext:
        """Return what a rollout with this trainer's model needs; its fields are documented in `RolloutContext`."""
        return RolloutContext(
            rows=self._call.rows,
            is_training=self._mode == "train",
            tokenizer=self._tokenizer,
            end_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            **{name: getattr(self.args, name) for name in OPTIONS},
            max_context_length=self._context_length(),
            streams=self._next_streams,
            generation_session=self.generation_session,
            record=self._record_rollout,
        )

    def _next_streams(self) -> Streams:
        """Return the seeds of the next rollout, which differ from those of every other rollout of the run."""
        place = (self._mode, self.state.global_step)
        self._rollouts = (place, self._rollouts[1] + 1 if self._rollouts[0] == place else 0)
        first_row = self.accelerator.process_index * len(self._call.rows)
        return Streams((self.args.seed, *place, self._rollouts[1]), first_row)

    def _context_length(self) -> int | None:
        """Return how many tokens prompt and trajectory may have together, or `None` where nothing limits them."""
        if not self.use_vllm:
            of_model = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
            return self.args.max_context_length or of_model
        if self._engine_context_length is None:  # vLLM refuses longer requests, so its limit applies
            self._engine_context_length = engine_context_length(self.vllm_generation, self.accelerator.is_main_process)
        return min(self._engine_context_length, self.args.max_context_length or self._engine_context_length)

    def generation_session(
        self, end_ids: Sequence[int] | None = None
    ) -> AbstractContextManager[Generate | StreamingGenerate]:
        """Open what samples turns, vLLM or the model itself. A turn ends at one of `end_ids`, by default TRL's."""
        end_ids, accelerator = self.eos_token_ids if end_ids is None else end_ids, self.accelerator
        if self.use_vllm:
            if self.state.global_step != self._last_loaded_step:  # TRL does the same before it generates
                self.vllm_generation.sync_weights()
                self._last_loaded_step = self.state.global_step
            return vllm_session(
                EngineSource(
                    engine=self.vllm_generation,
                    end_ids=end_ids,
                    greedy=self.args.temperature == 0,
                    process=accelerator.process_index,
                    local_process=accelerator.local_process_index,
                    processes=accelerator.num_processes,
                )
            )
        return transformers_session(
            ModelSource(
                model=self._model_for_generation,
                config=greedy(self.generation_config) if self.args.temperature == 0 else self.generation_config,
                end_ids=end_ids,
                pad_id=self._tokenizer.pad_token_id,  # TRL sets it where the tokenizer has none
                kv_cache_tokens=self.args.kv_cache_tokens,
                stop_after_code=self._tokenizer if self.args.stop_after_code else None,
                equal_forwards=needs_equal_forwards(
                    self.model,
                    is_sharded=self._dist.is_fsdp or self._dist.is_zero3,
                    processes=accelerator.num_processes,
                ),
            )
        )

    @contextmanager
    def _model_for_generation(self) -> Iterator[torch.nn.Module]:
        """Yield the unwrapped model for a whole rollout, with sharded parameters gathered and without gradients."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self.accelerator.autocast(),  # PEFT's `generate` and TRL's forwards would otherwise differ in precision
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def _rewards_of_this_rank(self, rows: int) -> list[float | None]:
        """Return the weighted reward of each of this rank's rows, `None` where no function gave one."""
        mine = self._call.rewards[self.accelerator.process_index * rows :][:rows]
        totals = (mine * self.reward_weights.to(mine)).nansum(dim=1).masked_fill(mine.isnan().all(dim=1), torch.nan)
        return [None if total != total else total for total in totals.tolist()]

    def _record_rollout(
        self, trajectories: list[Trajectory], seconds: RolloutSeconds | None, in_metrics: bool
    ) -> None:
        """Write a rollout's traces, and add it to the metrics and to the outcomes of an evaluation."""
        if self.args.log_trajectories:
            self._traces.write(trajectories, step=self.state.global_step, mode=self._mode)
        if in_metrics and seconds is None:
            self._add_metrics(metrics.rollout_sums(trajectories, has_scores=False))
        elif in_metrics:
            times = {name: getattr(seconds, name) for name in RolloutSeconds.__slots__}
            sums = {f"rollout/{name}_seconds": (value, 1) for name, value in times.items()}
            self._add_metrics(metrics.rollout_sums(trajectories) | sums)
            if self._mode == "eval" and self._evaluation is not None:
                self._evaluation.outcomes.extend(
                    gather_object([(t.task_id, t.score and t.score.success) for t in trajectories])
                )

    # Bookkeeping

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self._mode == "train" else self.num_generations_eval

    def _add_metrics(self, sums: dict[str, tuple[float, float]]) -> None:
        """Log the ratio of each (sum, count), added over ranks before the division; every rank has the same keys."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64).to(self.accelerator.device, torch.float32)
        totals = self.accelerator.reduce(values, reduction="sum").tolist()
        for name, (total, count) in zip(sums, totals, strict=True):
            self._metrics[self._mode][name].append(total / count if count else float("nan"))
