"""`GVPOConfig`: the options that TRL's `GRPOConfig` lacks or for which GVPO has another default."""

import contextlib
import json
import warnings
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from gvpo_trl.failures import FailureKind
from gvpo_trl.objective import AGGREGATIONS
from gvpo_trl.step_advantages import RULES

LOSS_TYPES_OF = {"smtm": ("grpo",), "smts": ("dr_grpo",), "token-mean": ("dapo", "bnpo")}
"""Maps each of the paper's loss aggregations to TRL's `loss_type`; the first one is the default."""

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")
"""Values of TRL's `loss_type` that take one advantage per token."""

FAILURE_SPANS = ("turn", "code", "statement")
"""Values of `failure_span`."""

NO_CODE = ("penalise", "mask", "drop")
"""Values of `no_code`."""

FAILURE_PENALTY = 0.2
"""The paper's b."""

MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0. vLLM raises lower ones to it, and takes the lowest ones for greedy sampling."""

NARROWING = {
    "top_p": ("above 0 and at most 1; 1 keeps all tokens", (1, None), lambda value: 0 < value <= 1),
    "top_k": (
        "a whole number above 0; 0 keeps all tokens",
        (0, -1, None),
        lambda value: value >= 1 and value % 1 == 0,
    ),
    "min_p": ("between 0 and 1; 0 keeps all tokens", (0, None), lambda value: 0 < value <= 1),
}
"""Settings that narrow the sampling distribution: the allowed values in words, those that do not narrow it, a test."""

TRANSFORMERS_LACKS = {
    "num_beams": "beams share no log-probabilities per token, so leave it out",
    "num_return_sequences": "each trajectory has one turn at a time, so set num_generations",
    "prompt_lookup_num_tokens": "it takes one row at a time, so leave it out",
    "stop_strings": "use stop_after_code=True, or stop strings of vLLM",
}
"""Options of `generate` that no turn can be sampled with, each with its remedy."""

VLLM_LACKS = {"do_sample": "vLLM does not know it, and temperature=0 is greedy"}
"""Options of transformers that vLLM refuses, each with its remedy."""

TABLE_TRACKERS = ("wandb", "trackio")
"""Trackers to which TRL sends the table of completions."""


@dataclass
class GVPOConfig(GRPOConfig):
    r"""Configuration of [`GVPOTrainer`]: TRL's, with the paper's defaults and options for shaping and rollout.

    Only the parameters that are new or whose default differs are documented here; see [`~trl.GRPOConfig`] for the
    others. Where the paper does not state a value, the default comes from the closest public work, named below.

    Parameters:
        > Parameters that control the objective

        failure_penalty (`float` or `dict[str, float]`, *optional*, defaults to `0.2`):
            The paper's b, which says how much worse a failed step is than its trajectory. The paper's ablation calls
            0.1 too weak and 0.4 unstable. A mapping gives kinds of failures their own values, and `default` is the
            value of the kinds that it does not name: `{syntax: 0.4, no_code: 0, default: 0.2}`, as JSON on the command
            line. Without `default` these have 0.2.
        shaping (`str`, *optional*, defaults to `"multiplicative"`):
            `"multiplicative"` is the paper's method and `"additive"` its ablation. `"none"` gives every token the
            outcome advantage, which is GRPO without division by the standard deviation. `docs/step_advantages.md`
            describes the other names. `GVPOTrainer(step_advantages=…)` takes a function instead.
        failure_span (`str`, *optional*, defaults to `"turn"`):
            Which tokens of a failed step are shaped: the whole assistant `"turn"`, only the `"code"` in it, or the
            code from the `"statement"` that raised on (where none is known: the code). A failed turn without code has
            no code to shape.
        loss_aggregation (`str`, *optional*):
            The paper's name of the loss: `"smtm"`, `"smts"` or `"token-mean"`. It sets `loss_type` to `"grpo"`,
            `"dr_grpo"` or `"dapo"`. A `loss_type` that disagrees is an error.
        loss_type (`str`, *optional*, defaults to `"grpo"`):
            TRL's name of sequence-mean-token-mean, the paper's aggregation (TRL's default is `"dapo"`).
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            The paper does not divide by the standard deviation, because that biases the optimization.
        epsilon (`float`, *optional*, defaults to `0.2`) and epsilon_high (`float`, *optional*, defaults to `0.28`):
            Bounds of clip-higher. The paper does not state them; these are DAPO's.
        beta (`float`, *optional*, defaults to `0.0`):
            There is no KL term, as in LOOP and DAPO. The paper does not state one.
        num_generations (`int`, *optional*, defaults to `8`):
            The paper's group size.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            Each token's importance ratio is bounded on its own. TRL's default, `"sequence_mask"`, multiplies the
            ratios of a trajectory's thousands of tokens and masks whole trajectories.
        drop_small_advantages (`float`, *optional*, defaults to `0.0`):
            Zeroes the rows whose |Â| is below this, as LOOP does with 0.01. A row with a failed step is never dropped.
        skip_idle_rows (`bool`, *optional*, defaults to `True`):
            Leaves rows whose advantages are all 0 out of forward and backward, where nothing else gives them a
            gradient (`beta=0`, no entropy bonus, no `top_entropy_quantile`, no MoE loss, not `"bnpo"`). The loss stays
            the same. TRL's entropy and clip metrics then cover only the rows that are trained on.

        > Parameters that control the rollout

        max_turns (`int`, *optional*, defaults to `40`):
            The most turns of a trajectory (LOOP trains with 40 and evaluates with 50).
        max_turn_length (`int`, *optional*, defaults to `1500`):
            The most sampled tokens of one turn (LOOP's value).
        max_observation_length (`int`, *optional*, defaults to `3000`):
            The most tokens of one observation (LOOP's value). A note replaces the middle of a longer one.
        max_completion_length (`int`, *optional*, defaults to `32000`):
            The most tokens of a trajectory after its prompt, which are those of all turns and observations. It is also
            the divisor of `"smts"`.
        max_context_length (`int`, *optional*):
            The most tokens of prompt and trajectory together. With vLLM the default is the limit of its engine or
            server, which also bounds a larger value. Without vLLM it is the model's `max_position_embeddings`.
        kv_cache_tokens (`int`, *optional*, defaults to `262144`):
            Tokens whose keys and values are kept between turns when the model itself generates (without vLLM), over
            all trajectories of a process. The least recently used trajectories are dropped first. With `0` the model
            reads the whole history again in each turn.
        stop_after_code (`bool`, *optional*, defaults to `False`):
            Ends a turn at the end of its first code block; works without vLLM only. The end-of-turn token, which the
            model then does not sample, is added by the template and is not trained on.
        no_code_is_failure (`bool`, *optional*, defaults to `True`):
            Whether a turn without code to run counts as a failed step.
        no_code (`str`, *optional*, defaults to `"penalise"`):
            What becomes of a turn without code that counts as a failed step. `"penalise"` shapes it as any other,
            `"mask"` leaves its tokens out of the loss, and `"drop"` leaves its whole trajectory out of the loss. The
            trajectory's reward stays in its group's mean.
        caught_api_errors_fail (`bool`, *optional*, defaults to `False`):
            Whether a step whose code caught the error of an API call counts as failed, of the kind `caught_api`.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Leaves truncated trajectories out of the loss. TRL calls a completion truncated if its last token does not
            end a turn; here a trajectory that a budget of turns or tokens ended is truncated as well.
        log_trajectories (`bool`, *optional*, defaults to `True`):
            Writes every trajectory to `output_dir/_trajectories/` as one line of JSON, for `gvpo-trl view`.

        > Parameters that control the Hub

        hub_benchmark (`str`, *optional*):
            Id of a benchmark's data set on the Hub, `"owner/dataset"`, or of one of its tasks, `"owner/dataset:task"`.
            The TGC of each evaluation is then pushed in `.eval_results/` too, which the Hub shows on the benchmark's
            leaderboard. The default task is the name of the evaluated split.
    """

    num_generations: int | None = field(default=8, metadata={"help": "Trajectories per task: the paper's G."})
    max_completion_length: int | None = field(
        default=32000, metadata={"help": "Tokens of a trajectory after its prompt, observations included."}
    )
    loss_type: str | None = field(
        default=None,
        metadata={"help": "'grpo' (the paper's smtm, the default), 'dr_grpo' (smts), 'dapo' or 'bnpo' (token-mean)."},
    )
    scale_rewards: str = field(
        default="none", metadata={"help": "'none' as in the paper, 'group' or 'batch' divide by the std."}
    )
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip bound."})
    epsilon_high: float | None = field(default=0.28, metadata={"help": "Upper clip bound: clip-higher."})
    beta: float = field(default=0.0, metadata={"help": "KL coefficient; 0 loads no reference model."})
    vllm_importance_sampling_mode: str = field(
        default="token_truncate", metadata={"help": "How vLLM's importance ratios are bounded; per token here."}
    )

    failure_penalty: float | str | dict[str, float] | None = field(  # argparse takes the second type of the union
        default=FAILURE_PENALTY,
        metadata={"help": 'The paper\'s b, >= 0, or a mapping by kind: \'{"syntax": 0.4, "default": 0.2}\'.'},
    )
    shaping: str = field(default="multiplicative", metadata={"help": f"The rule of advantages: {', '.join(RULES)}."})
    failure_span: str = field(
        default="turn", metadata={"help": "Tokens of a failed step that are shaped: 'turn', 'code' or 'statement'."}
    )
    loss_aggregation: str | None = field(
        default=None, metadata={"help": "'smtm', 'smts' or 'token-mean': the paper's names, sets loss_type."}
    )
    drop_small_advantages: float = field(
        default=0.0, metadata={"help": "Zero rows with |Â| below this, unless they hold a failed step (LOOP: 0.01)."}
    )
    skip_idle_rows: bool = field(
        default=True, metadata={"help": "Leave rows out of the training step that cannot move the weights."}
    )
    max_turns: int = field(default=40, metadata={"help": "Turns of a trajectory."})
    max_turn_length: int = field(default=1500, metadata={"help": "New tokens of one turn."})
    max_observation_length: int = field(default=3000, metadata={"help": "Tokens of one observation."})
    max_context_length: int | None = field(
        default=None, metadata={"help": "Tokens of prompt and trajectory; the model's own limit when not set."}
    )
    kv_cache_tokens: int = field(
        default=262144, metadata={"help": "Tokens whose keys and values stay between turns, without vLLM; 0: none."}
    )
    stop_after_code: bool = field(
        default=False, metadata={"help": "End a turn with its first closed code block, without vLLM."}
    )
    no_code_is_failure: bool = field(
        default=True, metadata={"help": "Whether a turn without code counts as a failed step."}
    )
    no_code: str = field(
        default="penalise",
        metadata={"help": "'penalise' a failed turn without code, 'mask' it, or 'drop' its whole trajectory."},
    )
    caught_api_errors_fail: bool = field(
        default=False, metadata={"help": "Count a step as failed if its code caught the error of an API call."}
    )
    log_trajectories: bool = field(
        default=True, metadata={"help": "Write every trajectory to output_dir/_trajectories/."}
    )
    hub_benchmark: str | None = field(
        default=None,
        metadata={"help": "Benchmark on the Hub, 'owner/dataset' or 'owner/dataset:task', that gets the TGC."},
    )

    def __post_init__(self):
        self._check_objective()
        self._check_rollout()
        # TRL sets transformers' deprecated names of these two fields, for which transformers warns the user.
        for name in ("checkpointing", "checkpointing_kwargs"):
            if getattr(self, f"activation_{name}") is None:
                setattr(self, f"activation_{name}", getattr(self, f"gradient_{name}"))
        super().__post_init__()
        self._check_sampling()
        if self.log_completions and (places := self._places_of_completions()):
            warnings.warn(
                f"log_completions=True sends the tasks' texts to {'; '.join(places)}. AppWorld asks not to republish "
                "them: set log_completions=False and use gvpo-trl view.",
                stacklevel=3,
            )

    @classmethod
    def from_grpo(cls, args: GRPOConfig) -> "GVPOConfig":
        """Return TRL's configuration with GVPO's own options at their defaults. Every value of TRL's stays as it is.

        Raises:
            ValueError: an option of TRL's works with one advantage per trajectory only.
        """
        config = object.__new__(cls)
        for option in fields(cls):
            if not hasattr(args, option.name):
                has_factory = option.default is MISSING
                setattr(config, option.name, option.default_factory() if has_factory else option.default)
        vars(config).update(vars(args))
        config._check_objective()
        return config

    def _places_of_completions(self) -> list[str]:
        """List the trackers to which TRL sends the tables of completions; `reporting.uploads` guards the Hub."""
        return [f"a table of report_to={name!r}" for name in self.report_to if name in TABLE_TRACKERS]

    def _check_objective(self):
        if self.loss_aggregation is not None:
            _one_of("loss_aggregation", self.loss_aggregation, AGGREGATIONS)
            wanted = LOSS_TYPES_OF[self.loss_aggregation]
            if self.loss_type not in (None, *wanted):
                raise ValueError(
                    f"loss_aggregation={self.loss_aggregation!r} is loss_type={wanted[0]!r}, but loss_type is "
                    f"{self.loss_type!r}; set one of the two."
                )
            self.loss_type = self.loss_type or wanted[0]
        self.loss_type = self.loss_type or "grpo"
        if self.loss_type in ("vespo", "sapo", "luspo"):
            raise ValueError(
                f"loss_type={self.loss_type!r} does not use the clipped ratio per token that GVPO's advantages are "
                "made for; use 'grpo' (smtm), 'dr_grpo' (smts), 'dapo' or 'bnpo' (token-mean)."
            )
        _one_of("loss_type", self.loss_type, LOSS_TYPES)
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} has one ratio per trajectory, but the "
                "advantages differ per token; use 'token'."
            )
        if self.off_policy_mask_threshold is not None:
            raise ValueError(
                f"off_policy_mask_threshold={self.off_policy_mask_threshold} masks trajectories by one advantage "
                "each, but the advantages differ per token; leave it unset and use delta."
            )
        if not isinstance(self.scale_rewards, bool):  # TRL takes True for "group" and False for "none"
            _one_of("scale_rewards", self.scale_rewards, ("none", "group", "batch"))
        _one_of("shaping", self.shaping, tuple(RULES))
        _one_of("failure_span", self.failure_span, FAILURE_SPANS)
        _one_of("no_code", self.no_code, NO_CODE)
        if self.no_code != "penalise" and not self.no_code_is_failure:
            raise ValueError(
                f"no_code={self.no_code!r} applies to failed turns, but no_code_is_failure=False calls no turn "
                "without code failed; set one of the two."
            )
        self.failure_penalty = _parsed_penalty(self.failure_penalty)
        if not _is_finite_and_not_negative(self.drop_small_advantages):
            raise ValueError(f"drop_small_advantages={self.drop_small_advantages!r} must be >= 0; 0 drops nothing.")

    def _check_rollout(self):
        if not _is_finite_and_not_negative(self.temperature):
            raise ValueError(f"temperature={self.temperature!r} must be >= 0 and finite; 0 is greedy, for evaluation.")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} must be 0, which is greedy, or at least {MIN_TEMPERATURE}: vLLM "
                "would sample with another one, and the loss divides logits by it."
            )
        for name in ("max_turns", "max_turn_length", "max_observation_length", "max_completion_length"):
            value = getattr(self, name)
            if value is None or value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.max_context_length is not None and self.max_context_length < 2:
            raise ValueError(f"max_context_length={self.max_context_length} must be at least 2, or unset.")
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns=True would drop the column 'task_id', which the rollout needs; leave it False."
            )
        if not _is_finite_and_not_negative(self.kv_cache_tokens):
            raise ValueError(f"kv_cache_tokens={self.kv_cache_tokens!r} must be >= 0; 0 keeps no cache.")
        if self.stop_after_code and self.use_vllm:
            raise ValueError(
                "stop_after_code=True works without vLLM only; with use_vllm=True give vLLM a stop string through "
                "generation_kwargs={'stop': ['\\n```\\n'], 'include_stop_str_in_output': True}."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching=True is not supported for multi-turn rollouts: turns are "
                "generated by gvpo_trl's own generator. Leave it unset, or set use_vllm=True."
            )

    def _check_sampling(self):
        """Check the settings that both backends sample with; `generation_kwargs` overrides the fields."""
        extra = self.generation_kwargs or {}
        if extra.get("temperature", self.temperature) != self.temperature:
            raise ValueError(
                f"generation_kwargs sets temperature={extra['temperature']}, but the loss divides logits by "
                f"temperature={self.temperature}; set temperature alone."
            )
        unknown = VLLM_LACKS if self.use_vllm else TRANSFORMERS_LACKS
        for name, remedy in unknown.items():
            if extra.get(name) is not None:
                raise ValueError(f"generation_kwargs={{{name!r}: {extra[name]!r}}} cannot sample turns; {remedy}.")
        settings = {name: extra.get(name, getattr(self, name)) for name in NARROWING}
        for name, (allowed, neutral, is_allowed) in NARROWING.items():
            value = settings[name]
            if value not in neutral and not (isinstance(value, int | float) and is_allowed(value)):
                raise ValueError(f"{name}={value!r} must be {allowed}.")
        narrowed = [f"{name}={value}" for name, value in settings.items() if value not in NARROWING[name][1]]
        if narrowed and self.use_vllm and self.vllm_importance_sampling_correction:
            warnings.warn(
                f"{', '.join(narrowed)} narrows the sampling distribution, but the trainer scores tokens under "
                "the full one: the importance ratio is biased. Use top_p=1, top_k=0 and no min_p, or set "
                "vllm_importance_sampling_correction=False.",
                stacklevel=4,
            )


def _is_finite_and_not_negative(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def _parsed_penalty(given: Any) -> float | dict[str, float]:
    """Return `failure_penalty` as a number, or as a mapping that holds `default`; both may come as JSON."""
    value = given
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            value = json.loads(given)
    values = value if isinstance(value, dict) else {"default": value}
    for kind, penalty in values.items():
        if kind not in (*FailureKind, "default"):
            raise ValueError(
                f"failure_penalty={given!r} names the unknown kind {kind!r}; the kinds are {', '.join(FailureKind)}, "
                "and 'default' stands for the others."
            )
        if isinstance(penalty, bool) or not _is_finite_and_not_negative(penalty):
            name = "failure_penalty" if values is not value else f"failure_penalty[{str(kind)!r}]"
            raise ValueError(f"{name}={penalty!r} must be >= 0 and finite; shaping='none' turns shaping off.")
    if not isinstance(value, dict):
        return value
    return {"default": FAILURE_PENALTY} | {str(kind): float(penalty) for kind, penalty in value.items()}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}.")
