"""`GVPOTrainer`: TRL's `GRPOTrainer` with advantages that differ per step.

The method is in `objective.py`. Here it is wired: `_generate_and_score_completions` calls TRL's, then replaces the
advantages (B,) by the shaped ones (B, T). The loss stays TRL's, which takes both shapes, so importance ratios,
clipping, the loss aggregations, the entropy bonus and the MoE loss are TRL's.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from gvpo_trl.config import GVPOConfig
from gvpo_trl.generation.transformers import transformers_session
from gvpo_trl.generation.vllm import vllm_session
from gvpo_trl.objective import outcome_advantages, shape_advantages
from gvpo_trl.reporting.card import PAPER, name_local_base_model
from gvpo_trl.reporting.traces import FOLDER, TraceWriter
from gvpo_trl.rewards import passed_tests_share
from gvpo_trl.rollout.types import Generate, Trajectory
from gvpo_trl.training.checks import announcing, check_chat, check_datasets, check_rows, failed_tokens
from gvpo_trl.training.metrics import expected_attempts, goal_completion, rollout_sums, shaping_sums
from gvpo_trl.training.row_skipping import ActionsOnly, ScoresActions, loss_of_actions


class GVPOTrainer(GRPOTrainer):
    """Trainer for GVPO, Group Verification-based Policy Optimization for interactive coding agents.

    Takes the arguments of [`~trl.GRPOTrainer`], of which these differ:

    Args:
        args (`GVPOConfig`, *optional*):
            Configuration; a plain one named after the model when it is not given.
        train_dataset ([`~datasets.Dataset`]):
            Conversational prompts in `prompt` and one `task_id` a row, as `load_tasks` makes them.
        reward_funcs (*optional*):
            Reward functions of TRL's signature (`gvpo_trl.rewards`); the share of passed tests when not given.
        rollout_func (`MultiTurnRollout`):
            Runs the trajectories. Another function may stand here if it returns `env_mask` and `failed_mask` beside
            what TRL asks for.

    Raises:
        ValueError: for missing or contradicting arguments, before a model is loaded.
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
        if kwargs.get("rollout_func") is None:
            raise ValueError("rollout_func is missing; pass MultiTurnRollout(environments).")
        if kwargs.get("tools") or kwargs.get("environment_factory"):
            raise ValueError("tools and environment_factory are TRL's own loop; GVPOTrainer takes rollout_func alone.")
        check_datasets(train_dataset, eval_dataset)
        check_chat(model, kwargs.get("processing_class"), args, train_dataset)
        self.rollout_rows: list[dict[str, Any]] = []
        self._outcomes: list[tuple[str, bool | None]] = []
        self._env_masks: list[list[int]] | None = None  # of the rows that are being scored
        reward_funcs = passed_tests_share if reward_funcs is None else reward_funcs
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        if eval_dataset is not None:
            self._check_eval_groups()
        self.data_collator = announcing(self.data_collator, self.rollout_func)
        self._traces = TraceWriter(Path(args.output_dir) / FOLDER, rank=args.process_index)

    # The method

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with per-token advantages: shaped (B, T) in the place of (B,)."""
        self.rollout_rows = inputs
        batch = super()._generate_and_score_completions(inputs)
        self._env_masks = None
        action_mask = batch["completion_mask"] * batch["tool_mask"]  # (B, T)
        failed_mask = failed_tokens(inputs, action_mask)  # (B, T)
        outcome = self._outcome_advantages(batch["advantages"])  # (B,), NaN where unscorable
        shaped = shape_advantages(
            outcome, action_mask, failed_mask, penalty=self.args.failure_penalty, mode=self.args.shaping
        )
        small = (outcome.abs() < self.args.drop_small_advantages) & ~failed_mask.any(dim=1)
        batch["advantages"] = shaped.masked_fill(small.unsqueeze(1), 0.0)
        self._record_shaping(outcome, action_mask, failed_mask, batch["advantages"])
        return batch

    def _outcome_advantages(self, trl_advantages: torch.Tensor) -> torch.Tensor:
        """(B,) outcome advantages of this rank's rows, exactly 0 for a tie and NaN for an unscorable row.

        TRL's own advantages are kept where its options ask for more than R − mean(R): a scaling, or several rewards
        normalized one by one.
        """
        weights = self.reward_weights.to(self._rewards_per_func)
        rewards = self._rewards_per_func * weights  # (B of all ranks, functions)
        total = rewards.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
        everyone = outcome_advantages(total, self._group_size)
        if normalized := self.multi_objective_aggregation == "normalize_then_sum":  # a tie is one in every function
            each = torch.stack([outcome_advantages(column, self._group_size) for column in rewards.T])
            everyone = torch.where(everyone.isnan(), everyone, each.nan_to_num(nan=0.0).abs().sum(dim=0))
        rows = trl_advantages.numel()
        outcome = everyone[self.accelerator.process_index * rows :][:rows]
        if self.scale_rewards == "none" and not normalized:
            return outcome
        return torch.where((outcome == 0) | outcome.isnan(), outcome, trl_advantages)

    # What TRL calls on the way

    def _compute_loss(self, model, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss, without the work that cannot move the weights."""
        return loss_of_actions(self, super()._compute_loss, model, inputs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """TRL's log-probabilities; observations cost no LM head, those of the loss are hidden already."""
        if self._env_masks is not None and not isinstance(model, ActionsOnly):
            model = ScoresActions(model, self._env_masks, logits_to_keep)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """(B over all ranks, functions) rewards, kept because the sign of an advantage must not hang on rounding."""
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func

    def _generate(self, prompts: list) -> tuple:
        """TRL's rollout, with the conversation as it was in the place of one long assistant message."""
        tokenizer, parsers = self._tokenizer, {}
        for name in ("response_template", "response_schema"):  # they would parse all turns as one response
            if getattr(tokenizer, name, None) is not None:
                parsers[name] = getattr(tokenizer, name)
                setattr(tokenizer, name, None)
        try:
            *head, completions, logprobs, extra, images, tool_images = super()._generate(prompts)
        finally:
            for name, value in parsers.items():
                setattr(tokenizer, name, value)
        check_rows(*head[1:], extra.get("failed_mask"))
        self._env_masks = head[2]
        if "trajectory" in extra:
            empty = [{"role": "assistant", "content": ""}]  # TRL's tables need a message
            completions = [trajectory.completion_messages or empty for trajectory in extra["trajectory"]]
        return (*head, completions, logprobs, extra, images, tool_images)

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        """TRL's evaluation, with `{prefix}_tgc` and `{prefix}_sgc` over the whole data set, each task counted once."""
        self._check_eval_groups()
        self._outcomes.clear()
        self._metrics["eval"].clear()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        goals = goal_completion(expected_attempts(self._outcomes, dataloader.dataset, self.num_generations_eval))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in goals.items()})
        return output

    def create_model_card(self, *args, **kwargs) -> None:
        """TRL's model card, which names a base model that is a local folder `None`."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            name_local_base_model(Path(self.args.output_dir) / "README.md")

    # What the rollout asks for

    @property
    def tokenizer(self):
        """The text tokenizer, also of a model with a processor."""
        return self._tokenizer

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's pad token, which TRL sets to the end-of-sequence token where there is none."""
        return self._tokenizer.pad_token_id

    @property
    def context_length(self) -> int | None:
        """Tokens that prompt and trajectory may have together, `None` where neither vLLM nor the model says."""
        if self.use_vllm and self.args.vllm_max_model_length:
            return self.args.vllm_max_model_length
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def generation_session(self) -> AbstractContextManager[Generate]:
        """What samples the turns of a rollout: vLLM with `use_vllm`, else the model itself."""
        return vllm_session(self) if self.use_vllm else transformers_session(self)

    @contextmanager
    def model_for_generation(self) -> Iterator[torch.nn.Module]:
        """The unwrapped model, its sharded parameters gathered, without gradients: entered once around a rollout."""
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

    def record_rollout(self, trajectories: list[Trajectory], times: dict[str, float], *, in_metrics: bool) -> None:
        """Keep what the callback saw: traces, metrics (`times` are seconds by their use), an evaluation's outcomes."""
        if self.args.log_trajectories:
            self._traces.write(trajectories, step=self.state.global_step, mode=self._mode)
        if in_metrics:
            sums = {f"rollout/{name}_seconds": (value, 1) for name, value in times.items()}
            self._add_metrics(rollout_sums(trajectories) | sums)
            if self._mode == "eval":
                self._outcomes.extend(gather_object([(t.task_id, t.score and t.score.success) for t in trajectories]))

    # Bookkeeping

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self._mode == "train" else self.num_generations_eval

    def _check_eval_groups(self) -> None:
        size, processes = self.args.per_device_eval_batch_size, self.args.world_size
        if size * processes % self.num_generations_eval:
            raise ValueError(
                f"per_device_eval_batch_size={size} on {processes} process(es) must hold whole groups of "
                f"{self.num_generations_eval} samples; set it to a multiple of that, or set num_generations_eval."
            )

    def _add_metrics(self, sums: dict[str, tuple[float, float]]) -> None:
        """Log the ratios of sums, added over ranks before they are divided; every rank has the same keys."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64).to(self.accelerator.device, torch.float32)
        totals = self.accelerator.reduce(values, reduction="sum").tolist()
        for name, (total, count) in zip(sums, totals, strict=True):
            self._metrics[self._mode][name].append(total / count if count else float("nan"))

    def _record_shaping(self, outcome, action_mask, failed_mask, shaped) -> None:
        self._add_metrics(shaping_sums(outcome, action_mask, failed_mask, shaped))
        rows = self.accelerator.gather(torch.stack([outcome, (failed_mask & (shaped != 0)).any(dim=1)], dim=1))
        outcomes, moved = rows.view(-1, self._group_size, 2).unbind(dim=2)
        tied = (outcomes.nan_to_num(nan=0.0) == 0).all(dim=1)
        moved = tied & moved.any(dim=1)
        self._metrics[self._mode]["groups/zero_variance"].append(tied.float().mean().item())
        self._metrics[self._mode]["groups/zero_variance_with_gradient"].append(moved.float().mean().item())
