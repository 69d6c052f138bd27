"""`GVPOTrainer`: TRL's `GRPOTrainer` with advantages that differ per step.

The method is in `objective.py`; this module wires it into TRL. The table lists the nine hooks, which are the methods
of TRL and transformers that the trainer overrides. It says whether each is public, why it is overridden, and which
test of `tests/test_trl_contract.py` pins it. `test_nothing_of_trls_is_hidden_by_accident` makes sure that there is no
tenth.

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
from gvpo_trl.reporting.card import PAPER, name_local_base_model
from gvpo_trl.reporting.traces import FOLDER, TraceWriter
from gvpo_trl.rewards import passed_tests_share
from gvpo_trl.rollout.prefetch import Lookahead, Prefetch
from gvpo_trl.rollout.seam import OPTIONS, RolloutContext, RolloutSeconds
from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory
from gvpo_trl.step_advantages import apply_rule
from gvpo_trl.text import printable_values
from gvpo_trl.training import metrics
from gvpo_trl.training.advantages import summed_advantages, unscorable_rows
from gvpo_trl.training.checks import (
    check_chat,
    check_datasets,
    check_eval_groups,
    check_rollout,
    check_rows,
    check_sampling,
    failed_tokens,
)
from gvpo_trl.training.row_skipping import KNOWN_LOSSES, TrainingStep, fingerprint, loss_of_moving_rows
from gvpo_trl.training.rule_inputs import choose_rule, rule_inputs

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
        step_advantages (`Callable`, *optional*):
            A rule of `gvpo_trl.step_advantages`, or your own. The default is the rule that `args.shaping` names.

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
        self._step_advantages = choose_rule(kwargs.pop("step_advantages", None), args)
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

    # The method

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with the shaped advantages (B, T) in place of TRL's (B,)."""
        self._call = _Call(rows=inputs)
        batch = super()._generate_and_score_completions(inputs)
        action_mask = batch["completion_mask"] * batch["tool_mask"]  # (B, T)
        failed_mask = failed_tokens(inputs, action_mask)  # (B, T)
        outcome = self._outcome_advantages(batch["advantages"], self._call.rewards)  # (B,), NaN where unscorable
        views = rule_inputs(inputs, outcome, action_mask, failed_mask, self._group_size, self.args)
        shaped = apply_rule(self._step_advantages, views)
        small = (outcome.abs() < self.args.drop_small_advantages) & ~failed_mask.any(dim=1)
        batch["advantages"] = shaped.masked_fill(small.unsqueeze(1), 0.0)
        self._record_shaping(outcome, action_mask, failed_mask, batch["advantages"])
        if self.log_completions:
            self._escape_logged_texts()
        return batch

    def _outcome_advantages(self, trl_advantages: torch.Tensor, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Return the (B,) outcome advantages of this rank's rows: exactly 0 for a tie, NaN for an unscorable row.

        TRL's own advantages are kept where its options ask for more than R − mean(R): for a scaling, or for several
        rewards that are normalized one by one.

        Args:
            trl_advantages: (B,) advantages of this rank's rows, as TRL computed them.
            rewards_per_func: (B over all ranks, reward functions) unweighted rewards.
        """
        rewards = rewards_per_func * self.reward_weights.to(rewards_per_func)
        normalized = self.multi_objective_aggregation == "normalize_then_sum"
        everyone = summed_advantages(rewards, self._group_size, every_function_ties=normalized)
        rows = trl_advantages.numel()
        outcome = everyone[self.accelerator.process_index * rows :][:rows]
        if self.scale_rewards == "none" and not normalized:
            return outcome
        return torch.where((outcome == 0) | outcome.isnan(), outcome, trl_advantages)

    # Hooks that TRL and transformers call

    def train(self, *args, **kwargs):
        """Train as TRL does, but refuse greedy sampling.

        Raises:
            ValueError: sampling is greedy, so every trajectory of a group would have the same turns.
        """
        check_sampling(self.args)
        self._last_loaded_step = -1  # steps are counted anew
        output = super().train(*args, **kwargs)
        self._last_loaded_step = -1  # the weights of the best checkpoint may have been loaded
        return output

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss, computed without the rows that cannot move the weights."""
        step = TrainingStep(
            rows_may_be_skipped=self._rows_may_be_skipped(inputs),
            accelerator=self.accelerator,
            is_deepspeed=self.is_deepspeed_enabled,
        )
        return loss_of_moving_rows(super()._compute_loss, model, inputs, step)

    def _rows_may_be_skipped(self, inputs: dict[str, Any]) -> bool:
        """Whether a row has a gradient only through its advantages, and its tokens scale no other row's loss."""
        return (
            self.model.training
            and self.args.skip_idle_rows
            and self._loss_is_known
            and self.beta == 0
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and self.top_entropy_quantile == 1.0  # the threshold depends on the entropies of all rows
            and self.loss_type != "bnpo"
            and inputs.get("pixel_values") is None  # these have a row per image or tile, not per trajectory
        )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """Return TRL's (B over all ranks, functions) rewards, NaN for unscorable rows, and keep them to find ties."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        unscorable = self.accelerator.gather(unscorable_rows(inputs).to(rewards.device))
        self._call.rewards = rewards.masked_fill(unscorable.unsqueeze(1), torch.nan)
        return self._call.rewards

    def _generate(self, prompts: list) -> tuple:
        """Run TRL's rollout, and return each row's conversation in place of TRL's one long message."""
        tokenizer, parsers = self._tokenizer, {}
        for name in ("response_template", "response_schema"):  # TRL would parse all turns as one response
            if getattr(tokenizer, name, None) is not None:
                parsers[name] = getattr(tokenizer, name)
                setattr(tokenizer, name, None)
        try:
            *head, completions, logprobs, extra, images, tool_images = super()._generate(prompts)
        finally:
            for name, value in parsers.items():
                setattr(tokenizer, name, value)
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
        return RolloutContext(
            rows=self._call.rows,
            is_training=self._mode == "train",
            tokenizer=self._tokenizer,
            end_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            **{name: getattr(self.args, name) for name in OPTIONS},
            max_context_length=self._context_length(),
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
