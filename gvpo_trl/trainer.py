"""`GVPOTrainer`: TRL's `GRPOTrainer` with advantages that differ per step.

The method is in `objective.py`; this module wires it into TRL. The table lists the hooks, which are the methods
of TRL and transformers that the trainer overrides. It says whether each is public, why it is overridden, and which
test of `tests/test_trl_contract.py` pins it. `test_nothing_of_trls_is_hidden_by_accident` makes sure that there is no
other.

    __init__                           public    checks arguments before a model is loaded, sets defaults
                                                 test_the_overridden_methods_have_these_signatures
    train                              public    refuses greedy sampling before anything runs
                                                 test_the_overridden_methods_have_these_signatures
    _generate_and_score_completions    private   replaces advantages (B,) by shaped ones (B, T)
                                                 test_the_loss_takes_one_advantage_per_token
    _generate                          private   gives rewards and logs the conversation, not one long message
                                                 test_a_whole_completion_is_one_message_and_tables_take_conversations
    _calculate_rewards                 private   leaves unscorable rows out, keeps rewards to find ties
                                                 test_advantages_are_the_difference_to_the_mean
    _compute_loss                      private   leaves out rows that cannot move the weights
                                                 test_every_term_of_the_loss_is_known
    get_batch_samples                  public    tells the rollout which tasks come next
                                                 test_batches_are_taken_through_one_method
    _init_training_state               private   restores the buffer, the metrics and the place in a stream
                                                 test_the_overridden_methods_have_these_signatures
    _save_checkpoint                   private   saves the buffer, the loss and the metrics that no log has shown
                                                 test_the_overridden_methods_have_these_signatures
    evaluation_loop                    public    adds TGC and SGC over the whole data set
                                                 test_the_overridden_methods_have_these_signatures
    create_model_card                  public    names a base model that is a local folder
                                                 test_the_model_card_of_a_local_model_says_none

TRL's loss takes advantages of both shapes. It is used as it is, with TRL's importance ratios, clipping, aggregations,
entropy bonus and MoE loss.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import has_length
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from gvpo_trl.config import GVPOConfig
from gvpo_trl.generation.ranks import needs_equal_forwards
from gvpo_trl.generation.sampling import greedy
from gvpo_trl.generation.transformers import ModelSource, transformers_session
from gvpo_trl.generation.vllm import EngineSource, engine_context_length, vllm_session
from gvpo_trl.objective import shape_advantages
from gvpo_trl.reporting.card import PAPER, name_local_base_model
from gvpo_trl.reporting.traces import FOLDER, TraceWriter
from gvpo_trl.rewards import passed_tests_share
from gvpo_trl.rollout.prefetch import Lookahead, Prefetch
from gvpo_trl.rollout.seam import RolloutContext, RolloutSeconds
from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory
from gvpo_trl.text import printable_values
from gvpo_trl.training import metrics
from gvpo_trl.training.advantages import outcome_of_rows, unscorable_rows
from gvpo_trl.training.checks import (
    check_chat,
    check_datasets,
    check_eval_groups,
    check_rollout,
    check_rows,
    check_sampling,
    failed_tokens,
    unparsed_responses,
)
from gvpo_trl.training.resume import Resume, last_checkpoint
from gvpo_trl.training.row_skipping import (
    KNOWN_LOSSES,
    TrainingStep,
    fingerprint,
    loss_of_moving_rows,
    rows_may_be_skipped,
)

logger = logging.getLogger(__name__)

LOSS_METHODS = (GRPOTrainer._compute_loss, GRPOTrainer.compute_loss, GRPOTrainer.training_step)
"""The methods in which TRL could add a term to the loss."""


@dataclass(slots=True)
class _Call:
    """State of one call of `_generate_and_score_completions` while it runs."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """(B,) the data set's rows of the batch; TRL passes only their prompts to the rollout."""
    rewards: torch.Tensor | None = None
    """(B over all ranks, reward functions) unweighted rewards, NaN where a function gave none."""


class GVPOTrainer(GRPOTrainer):
    """Trainer for GVPO, Group Verification-based Policy Optimization for interactive coding agents.

    It takes the arguments of [`~trl.GRPOTrainer`]. These differ from TRL's:

    Args:
        args (`GVPOConfig`, *optional*):
            Configuration. The default has an output directory named after the model.
        train_dataset ([`~datasets.Dataset`]):
            Rows with a conversation in `prompt` and a `task_id`, as `load_tasks` makes them.
        reward_funcs (*optional*):
            Reward functions with TRL's signature, for example from `gvpo_trl.rewards`. The default is the share of
            passed tests.
        rollout_func (`MultiTurnRollout`):
            Runs the trajectories. Any other function will do if it returns `env_mask` and `failed_mask` beside what
            TRL asks for.

    Raises:
        ValueError: an argument is missing or contradicts another one; raised before a model is loaded.
    """

    _tag_names = ["trl", "gvpo"]  # noqa: RUF012 - TRL's own declaration
    _name = "GVPO"
    _paper = PAPER

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GVPOConfig(f"{Path(name).name or 'model'}-GVPO")
        if not isinstance(args, GVPOConfig):
            raise ValueError(f"args is a {type(args).__name__}; GVPOTrainer needs a GVPOConfig.")
        check_rollout(kwargs)
        check_datasets(train_dataset, eval_dataset)
        turn_ends = check_chat(model, kwargs.get("processing_class"), args, train_dataset)
        self._call = _Call()
        self._outcomes: list[tuple[str, bool | None]] = []
        self._lookahead: Lookahead | None = None
        self._engine_context_length: int | None = None
        reward_funcs = passed_tests_share if reward_funcs is None else reward_funcs
        temperature = args.temperature  # TRL divides logits by it; a greedy evaluation scores the unscaled logits
        args.temperature = temperature or 1.0
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        args.temperature = temperature
        self.eos_token_ids = list(dict.fromkeys([*self.eos_token_ids, *turn_ends]))  # any other end is a truncation
        self._loss_is_known = fingerprint(LOSS_METHODS) in KNOWN_LOSSES
        if args.skip_idle_rows and not self._loss_is_known:
            logger.warning("This TRL computes its loss in a way that gvpo_trl does not know: no row is skipped.")
        self._traces = TraceWriter(Path(args.output_dir) / FOLDER, rank=args.process_index)
        self._resume = Resume(self)

    # The method

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with the shaped advantages (B, T) in place of TRL's (B,)."""
        self._call = _Call(rows=inputs)
        batch = super()._generate_and_score_completions(inputs)
        action_mask = batch["completion_mask"] * batch["tool_mask"]  # (B, T)
        failed_mask = failed_tokens(inputs, action_mask)  # (B, T)
        outcome = outcome_of_rows(self, batch["advantages"], self._call.rewards)  # (B,), NaN where unscorable
        shaped = shape_advantages(
            outcome, action_mask, failed_mask, penalty=self.args.failure_penalty, mode=self.args.shaping
        )
        small = (outcome.abs() < self.args.drop_small_advantages) & ~failed_mask.any(dim=1)
        batch["advantages"] = shaped.masked_fill(small.unsqueeze(1), 0.0)
        self._record_shaping(outcome, action_mask, failed_mask, batch["advantages"])
        if self.log_completions:
            self._escape_logged_texts()
        return batch

    # Hooks that TRL and transformers call

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as TRL does, but refuse greedy sampling, and resume from the last checkpoint that is complete.

        Raises:
            ValueError: sampling is greedy, so every trajectory of a group would have the same turns.
        """
        check_sampling(self.args)
        self._last_loaded_step = -1  # steps are counted anew
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir) or True
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._last_loaded_step = -1  # the weights of the best checkpoint may have been loaded
        return output

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss, computed without the rows that cannot move the weights."""
        step = TrainingStep(
            rows_may_be_skipped=self._loss_is_known and rows_may_be_skipped(self, inputs),
            accelerator=self.accelerator,
            is_deepspeed=self.is_deepspeed_enabled,
        )
        return loss_of_moving_rows(super()._compute_loss, model, inputs, step)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """Return TRL's (B over all ranks, functions) rewards, NaN for unscorable rows, and keep them to find ties."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        unscorable = self.accelerator.gather(unscorable_rows(inputs).to(rewards.device))
        self._call.rewards = rewards.masked_fill(unscorable.unsqueeze(1), torch.nan)
        return self._call.rewards

    def _generate(self, prompts: list) -> tuple:
        """Run TRL's rollout, and return each row's conversation in place of TRL's one long message."""
        with unparsed_responses(self._tokenizer):  # TRL would parse all turns as one response
            *head, completions, logprobs, extra, images, tool_images = super()._generate(prompts)
        check_rows(*head[1:], extra.get("failed_mask"))
        if "trajectory" in extra:
            empty = [{"role": "assistant", "content": ""}]  # TRL's tables need a message
            completions = [trajectory.completion_messages or empty for trajectory in extra["trajectory"]]
        return (*head, completions, logprobs, extra, images, tool_images)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Return the batches of one optimizer step, and tell the rollout about them and the batch after them."""
        prefetch = getattr(self.rollout_func, "prefetch", None)
        if not isinstance(prefetch, Prefetch):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._lookahead is None or self._lookahead.source is not epoch_iterator:
            self._lookahead = Lookahead(epoch_iterator)
        batches, num_items = super().get_batch_samples(self._lookahead, num_batches, device)
        is_last = self.state.global_step + 1 >= self.state.max_steps
        prefetch.expect([*batches, *([] if is_last else self._lookahead.peek())])
        return batches, num_items

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        """Restore what TRL's checkpoint leaves out, and return the position in the data at which to go on."""
        position = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        return self._resume.begin(checkpoint, *position)

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint as TRL does, and beside it what TRL leaves out."""
        run_dir = self._get_output_dir(trial)
        self._resume.save(run_dir)
        super()._save_checkpoint(model, trial)
        self._resume.prune(run_dir)

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        """Evaluate as TRL does, and add `{prefix}_tgc` and `{prefix}_sgc`, which count each task only once."""
        check_eval_groups(self.args, self.num_generations_eval)
        self._outcomes.clear()
        self._metrics["eval"].clear()
        dataset = metrics.source_dataset(dataloader)
        if kwargs.get("description") == "Prediction" and not has_length(dataset):
            dataloader = self.get_eval_dataloader(dataset)  # TRL prepares a stream only there
            dataset = metrics.source_dataset(dataloader)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        goals = metrics.goal_completion(metrics.expected_attempts(self._outcomes, dataset, self.num_generations_eval))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in goals.items()})
        return output

    def create_model_card(self, *args, **kwargs) -> None:
        """Write TRL's model card, and name a base model that is a local folder, for which TRL writes `None`."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            name_local_base_model(Path(self.args.output_dir) / "README.md")

    # What the rollout needs from the trainer

    @property
    def tokenizer(self):
        """The text tokenizer, which is part of the processor where a model has one."""
        return self._tokenizer

    def rollout_context(self) -> RolloutContext:
        """Return what a rollout with this trainer's model needs; its fields are documented in `RolloutContext`."""
        args = self.args
        return RolloutContext(
            rows=self._call.rows,
            is_training=self._mode == "train",
            tokenizer=self._tokenizer,
            end_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            max_turns=args.max_turns,
            max_turn_length=args.max_turn_length,
            max_observation_length=args.max_observation_length,
            max_completion_length=args.max_completion_length,
            max_context_length=self._context_length(),
            no_code_is_failure=args.no_code_is_failure,
            failure_span=args.failure_span,
            mask_truncated_completions=args.mask_truncated_completions,
            generation_session=self.generation_session,
            record=self._record_rollout,
        )

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
        """Open what samples the turns of a rollout: vLLM with `use_vllm`, else the model itself.

        Args:
            end_ids: ids that end a turn; the default is TRL's `eos_token_ids`.
        """
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
                    step=self.state.global_step,
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
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def _record_rollout(self, trajectories: list[Trajectory], seconds: RolloutSeconds, in_metrics: bool) -> None:
        """Write a rollout's traces, and add it to the metrics and to the outcomes of an evaluation."""
        if self.args.log_trajectories:
            self._traces.write(trajectories, step=self.state.global_step, mode=self._mode)
        if in_metrics:
            times = {name: getattr(seconds, name) for name in RolloutSeconds.__slots__}
            sums = {f"rollout/{name}_seconds": (value, 1) for name, value in times.items()}
            self._add_metrics(metrics.rollout_sums(trajectories) | sums)
            if self._mode == "eval":
                self._outcomes.extend(gather_object([(t.task_id, t.score and t.score.success) for t in trajectories]))

    # Bookkeeping

    def _escape_logged_texts(self) -> None:
        """Spell out control characters in TRL's table of completions, so that no terminal obeys an agent's text."""
        for logged in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
            texts = [printable_values(entry) for entry in logged]
            logged.clear()
            logged.extend(texts)

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

    def _record_shaping(self, outcome, action_mask, failed_mask, shaped) -> None:
        self._add_metrics(metrics.shaping_sums(outcome, action_mask, failed_mask, shaped))
        rows = self.accelerator.gather(torch.stack([outcome, (failed_mask & (shaped != 0)).any(dim=1)], dim=1))
        for name, share in metrics.group_shares(*rows.unbind(dim=1), self._group_size).items():
            self._metrics[self._mode][name].append(share)
