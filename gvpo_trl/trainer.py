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
    _tool_call_loop                    private   wraps the tools of TRL's own loop, to record which turns failed
                                                 test_the_overridden_methods_have_these_signatures
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
    save_model                         public    puts the trained one of several adapters into the root
                                                 test_the_overridden_methods_have_these_signatures
    evaluation_loop                    public    adds TGC and SGC over the whole data set
                                                 test_the_overridden_methods_have_these_signatures
    log                                public    keeps tables of training and evaluations apart
                                                 test_the_overridden_methods_have_these_signatures
    create_model_card                  public    says how the agent runs, what it reached, how it was trained
                                                 test_the_model_card_of_a_local_model_says_none
    push_to_hub                        public    keeps the tasks' texts on this machine
                                                 test_the_overridden_methods_have_these_signatures
    _push_from_checkpoint              private   does the same at each checkpoint
                                                 test_the_overridden_methods_have_these_signatures

TRL's loss takes advantages of both shapes. It is used as it is, with TRL's importance ratios, clipping, aggregations,
entropy bonus and MoE loss.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import has_length
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import print_prompt_completions_sample

from gvpo_trl.config import GVPOConfig
from gvpo_trl.multi_turn import Call, MultiTurnTrainer
from gvpo_trl.reporting.card import PAPER, write_model_card
from gvpo_trl.reporting.console import write_lines
from gvpo_trl.reporting.uploads import check_uploads, only_uploadable
from gvpo_trl.rewards import passed_tests_share
from gvpo_trl.rollout.prefetch import Lookahead, Prefetch
from gvpo_trl.step_advantages import StepAdvantageRule, apply_rule
from gvpo_trl.training import metrics
from gvpo_trl.training.adapters import put_trained_adapter_first
from gvpo_trl.training.advantages import outcome_of_rows, unscorable_rows
from gvpo_trl.training.checks import (
    check_chat,
    check_datasets,
    check_environment_of,
    check_eval_groups,
    check_extras,
    check_rollout,
    check_rows,
    check_sampling,
    failed_tokens,
    unparsed_responses,
)
from gvpo_trl.training.completions import complete_table, emptied, own_table
from gvpo_trl.training.evaluations import Evaluation
from gvpo_trl.training.quiet import quieten, report_rows_without_reward, without_dump_of_rows
from gvpo_trl.training.resume import Resume, last_checkpoint
from gvpo_trl.training.room import warn_of_little_room
from gvpo_trl.training.row_skipping import (
    KNOWN_LOSSES,
    TrainingStep,
    fingerprint,
    loss_of_moving_rows,
    rows_may_be_skipped,
)
from gvpo_trl.training.rule_inputs import choose_rule, rule_inputs
from gvpo_trl.training.tool_calls import LoopResult, ToolVerdict, ToolWatch

logger = logging.getLogger(__name__)

LOSS_METHODS = (GRPOTrainer._compute_loss, GRPOTrainer.compute_loss, GRPOTrainer.training_step)
"""The methods in which TRL could add a term to the loss."""


class GVPOTrainer(MultiTurnTrainer):
    """Trainer for GVPO, Group Verification-based Policy Optimization for interactive coding agents.

    It takes the arguments of [`~trl.GRPOTrainer`]. These differ from TRL's:

    Args:
        args (`GVPOConfig`, *optional*):
            Configuration. The default has an output directory named after the model. A `GRPOConfig` keeps all of
            its values, and GVPO's own options have their defaults.
        train_dataset ([`~datasets.Dataset`]):
            Rows with a conversation in `prompt` and, for a `rollout_func`, a `task_id`, as `load_tasks` makes them.
        reward_funcs (*optional*):
            Reward functions with TRL's signature, for example from `gvpo_trl.rewards`. The default is the share of
            passed tests.
        rollout_func (`MultiTurnRollout`):
            Runs the trajectories. Any other function will do if it returns `env_mask` and `failed_mask` beside what
            TRL asks for. Without it, `tools` or `environment_factory` run TRL's own tool loop.
        tool_verdict (*optional*):
            For tools that report a failure as data: a function of a tool's name, arguments and result that returns
            `None`, `True` or a `FailureKind`.
        tool_faults (*optional*):
            Exception classes of tools that mean that the machinery broke: such a row is unscorable and never shaped.
        step_advantages (`Callable`, *optional*):
            A rule of `gvpo_trl.step_advantages`, or your own. The default is the rule that `args.shaping` names.

    Raises:
        ValueError: an argument is missing or contradicts another one; raised before a model is loaded.
    """

    _tag_names = ["trl", "gvpo"]  # noqa: RUF012 - TRL's own declaration
    _name = "GVPO"
    _paper = PAPER

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        *,
        tool_verdict: ToolVerdict | None = None,
        tool_faults: tuple[type[Exception], ...] = (),
        step_advantages: StepAdvantageRule | None = None,
        **kwargs,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GVPOConfig(f"{Path(name).name or 'model'}-GVPO")
        if not isinstance(args, GRPOConfig):
            raise ValueError(f"args is a {type(args).__name__}; GVPOTrainer needs a GVPOConfig.")
        quieten()
        args = args if isinstance(args, GVPOConfig) else GVPOConfig.from_grpo(args)
        self._step_advantages = choose_rule(step_advantages, args)
        check_extras(args)
        has_tools = check_rollout(kwargs, args.failure_span, hooks=(tool_verdict, tool_faults))
        if not has_tools:
            check_uploads(args, kwargs["rollout_func"])
        check_datasets(
            train_dataset, eval_dataset, environment_factory=kwargs.get("environment_factory"), tools=has_tools
        )
        check_environment_of(kwargs.get("rollout_func"), train_dataset)
        turn_ends = [] if has_tools else check_chat(model, kwargs.get("processing_class"), args, train_dataset)
        self._tool_hooks = {"verdict": tool_verdict, "faults": tuple(tool_faults)}
        self._lookahead: Lookahead | None = None
        self._evaluation_logs: dict[str, Any] | None = None
        reward_funcs = passed_tests_share if reward_funcs is None and not has_tools else reward_funcs
        temperature = args.temperature  # TRL divides logits by it; a greedy evaluation scores the unscaled logits
        args.temperature = temperature or 1.0
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        args.temperature = temperature
        write_lines(self.callback_handler)
        self.eos_token_ids = list(dict.fromkeys([*self.eos_token_ids, *turn_ends]))  # any other end is a truncation
        self._loss_is_known = fingerprint(LOSS_METHODS) in KNOWN_LOSSES
        if args.skip_idle_rows and not self._loss_is_known:
            logger.warning("This TRL computes its loss in a way that gvpo_trl does not know: no row is skipped.")
        self._resume = Resume(self)

    # The method

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with the shaped advantages (B, T) in place of TRL's (B,)."""
        self._call = Call(rows=inputs)
        batch = super()._generate_and_score_completions(inputs)
        action_mask = batch["completion_mask"] * batch["tool_mask"]  # (B, T)
        watch = self._call.watch
        rows = watch.rolled_out() if watch else inputs
        failed_mask = failed_tokens(rows, action_mask)  # (B, T)
        outcome = outcome_of_rows(self, batch["advantages"], self._call.rewards)  # (B,), NaN where unscorable
        shaped = apply_rule(
            self._step_advantages, rule_inputs(rows, outcome, action_mask, failed_mask, self._group_size, self.args)
        )
        small = (outcome.abs() < self.args.drop_small_advantages) & ~failed_mask.any(dim=1)
        batch["advantages"] = shaped.masked_fill(small.unsqueeze(1), 0.0)
        self._record_shaping(outcome, action_mask, failed_mask, batch["advantages"])
        if watch is not None:
            self._record_rollout(watch.rewarded(self._rewards_of_this_rank(len(inputs))), None, in_metrics=True)
        if self.log_completions:
            complete_table(self._logs, inputs, batch["advantages"], action_mask, failed_mask)
        return batch

    # Hooks that TRL and transformers call

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as TRL does, but refuse greedy sampling, and resume from the last checkpoint that is complete.

        Raises:
            ValueError: sampling is greedy, so every trajectory of a group would have the same turns.
        """
        check_sampling(self.args)
        warn_of_little_room(self, self.train_dataset)
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
        with without_dump_of_rows():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        watch = self._call.watch
        lost = torch.tensor(watch.unscorable) if watch else unscorable_rows(inputs)
        unscorable = self.accelerator.gather(lost.to(rewards.device))
        self._call.rewards = rewards.masked_fill(unscorable.unsqueeze(1), torch.nan)
        mine = self._call.rewards[self.accelerator.process_index * len(inputs) :][: len(inputs)]
        report_rows_without_reward(inputs, mine, self._traces.path if self.args.log_trajectories else None)
        if self._evaluation is not None and self._evaluation.predictions is not None:
            self._evaluation.predictions.add(inputs, completions, mine, self.reward_weights, self.reward_func_names)
        return self._call.rewards

    def _generate(self, prompts: list) -> tuple:
        """Run TRL's rollout, and return each row's conversation in place of TRL's one long message."""
        if self.rollout_func is None:
            return super()._generate(prompts)
        with unparsed_responses(self._tokenizer):  # TRL would parse all turns as one response
            *head, completions, logprobs, extra, images, tool_images = super()._generate(prompts)
        check_rows(*head[1:], extra.get("failed_mask"))
        if "trajectory" in extra:
            empty = [{"role": "assistant", "content": ""}]  # TRL's tables need a message
            completions = [trajectory.completion_messages or empty for trajectory in extra["trajectory"]]
        return (*head, completions, logprobs, extra, images, tool_images)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *args) -> tuple:
        """Run TRL's loop over watched tools."""
        self._call.watch = watch = ToolWatch(prompts, completions, **self._tool_hooks)
        self._sync_tool_dicts = watch.wrap(self._sync_tool_dicts)
        self._async_tool_dicts = watch.wrap(self._async_tool_dicts)
        output = super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *args)
        tool_mask, _, ids, logprobs, *_ = output
        watch.finish(
            LoopResult(prompt_ids=prompt_ids, completion_ids=ids, tool_mask=tool_mask, logprobs=logprobs),
            tokenizer=self._tokenizer,
            end_ids=self.eos_token_ids,
            task_ids=[row.get("task_id") for row in self._call.rows],
            iterations=self.max_tool_calling_iterations,
        )
        return output

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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as TRL does, with the trained adapter in the folder's root where a model has several."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            put_trained_adapter_first(self.accelerator.unwrap_model(self.model), folder)

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        """Evaluate as TRL does, give every metric the prefix, and add TGC and SGC, which count each task only once.

        The output of a prediction holds one result per attempt as `predictions` (rows of the data set, samples), and
        the rows' task ids as `label_ids`.
        """
        check_eval_groups(self.args, self.num_generations_eval)
        warn_of_little_room(self, metrics.source_dataset(dataloader))
        dataset, predicts = metrics.source_dataset(dataloader), kwargs.get("description") == "Prediction"
        if predicts and not has_length(dataset):
            dataloader = self.get_eval_dataloader(dataset)  # TRL prepares a stream only there
        samples = self.num_generations_eval if predicts or has_length(dataset) else 1  # TRL has repeated the stream
        has_scores = self.rollout_func is not None
        self._evaluation = evaluation = Evaluation(dataset, samples, predicts, has_scores=has_scores)
        training, self._metrics["eval"], self._logs = self._logs, defaultdict(list), emptied(self._logs)
        try:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            output = evaluation.complete(output, metric_key_prefix, self._metrics["eval"])
        finally:
            self._evaluation, self._evaluation_logs, self._logs = None, self._logs, training
            self._metrics["eval"].clear()  # TRL's `log` would add them once more, under the prefix "eval" alone
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with a table of completions that fits a terminal, and one of its own for an evaluation."""
        with own_table(self, logs, print_prompt_completions_sample):
            super().log(logs, start_time)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Write a model card with TRL's arguments; its content is described in `reporting.card`."""
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            write_model_card(self, dataset_name)

    def push_to_hub(self, *args, **kwargs):
        """Push as the Trainer does, but only files that hold no text of a task, unless the tasks may be published."""
        with only_uploadable(self.rollout_func):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_uploadable(self.rollout_func):
            super()._push_from_checkpoint(checkpoint_folder)

    def _record_shaping(self, outcome, action_mask, failed_mask, shaped) -> None:
        self._add_metrics(metrics.shaping_sums(outcome, action_mask, failed_mask, shaped))
        rows = self.accelerator.gather(torch.stack([outcome, (failed_mask & (shaped != 0)).any(dim=1)], dim=1))
        for name, share in metrics.group_shares(*rows.unbind(dim=1), self._group_size).items():
            self._metrics[self._mode][name].append(share)
