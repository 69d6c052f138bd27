"""The fields of a configuration file for data and environment; `GVPOConfig` and TRL's `ModelConfig` hold the others.

This module imports the standard library only.
"""

from dataclasses import dataclass, field


@dataclass
class ScriptArguments:
    """What `gvpo-trl train` and `gvpo-trl evaluate` need beside the model and the trainer.

    Args:
        appworld_root (`str`, *optional*):
            Folder that holds AppWorld's `data/`. The default is `APPWORLD_ROOT`, then the current folder.
        appworld_venv (`str`, *optional*):
            AppWorld's own virtual environment. The default is `GVPO_APPWORLD_VENV`, then the user's cache folder.
        train_split (`str`, defaults to `"train"`):
            Split to train on.
        eval_split (`str`, *optional*, defaults to `"dev"`):
            Split to evaluate on, in `gvpo-trl evaluate` and during training if `eval_strategy` asks for it.
        difficulties (`list[int]`, *optional*):
            Difficulties to train on. The default is all of them.
        eval_difficulties (`list[int]`, *optional*):
            Difficulties to evaluate on. The default is all of them.
        max_train_tasks (`int`, *optional*):
            Train on at most this many tasks, the first ones of the split.
        max_eval_tasks (`int`, *optional*):
            Evaluate on at most this many tasks, the first ones of the split.
        prompt (`str`, defaults to `"react"`):
            Name of a prompt that ships with the package, or the path of a text file.
        max_episodes (`int`, *optional*, defaults to `16`):
            Largest number of worlds that are open at once. With `appworld_urls`, the default is the number of servers.
        isolation (`str`, *optional*, defaults to `"split"`):
            `"split"` runs agent code in a restricted interpreter, `"process"` in the world's own process.
        require_sandbox (`bool`, defaults to `False`):
            Refuse to run if the kernel cannot restrict the interpreter in full.
        appworld_urls (`list[str]`, *optional*):
            Addresses of running AppWorld environment servers, which replace the local processes.
            The processes of a distributed run share them out, so there must be at least one for each process.
        step_timeout_s (`float`, defaults to `30.0`):
            Seconds that one execution of the agent's code may take.
        observation_template (`str`, *optional*):
            Text of the user's message that shows an observation; it must contain `{observation}`.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer to use instead of the model's own.
        chat_template_path (`str`, *optional*):
            A Jinja file to use as the chat template.
        adapter_name_or_path (`str`, *optional*):
            A trained adapter to evaluate, or to train further instead of a new one.
        eval_samples (`int`, defaults to `1`):
            Attempts at each task in `gvpo-trl evaluate`. During training, `num_generations_eval` is the number.
        report_path (`str`, *optional*):
            File for the report of `gvpo-trl evaluate`. The default is `evaluation-<split>.json` in `output_dir`.
    """

    appworld_root: str | None = field(
        default=None,
        metadata={"help": "Folder that holds AppWorld's data/. Default: APPWORLD_ROOT, then the current folder."},
    )
    appworld_venv: str | None = field(
        default=None,
        metadata={"help": "AppWorld's own virtual environment. Default: GVPO_APPWORLD_VENV, then your cache."},
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(
        default="dev",
        metadata={"help": "Split to evaluate on, in `evaluate` and during training if eval_strategy asks for it."},
    )
    difficulties: list[int] | None = field(
        default=None, metadata={"help": "Difficulties to train on. Default: all of them."}
    )
    eval_difficulties: list[int] | None = field(
        default=None, metadata={"help": "Difficulties to evaluate on. Default: all of them."}
    )
    max_train_tasks: int | None = field(
        default=None, metadata={"help": "Train on at most this many tasks, the first ones of the split."}
    )
    max_eval_tasks: int | None = field(
        default=None, metadata={"help": "Evaluate on at most this many tasks, the first ones of the split."}
    )
    prompt: str = field(
        default="react", metadata={"help": "A prompt that ships with the package, or the path of a text file."}
    )
    max_episodes: int | None = field(
        default=None,
        metadata={"help": "Largest number of open worlds. Default: 16, or the number of appworld_urls."},
    )
    isolation: str | None = field(
        default=None,
        metadata={"help": "Run agent code in a restricted process (split, default), or beside the world (process)."},
    )
    require_sandbox: bool = field(
        default=False, metadata={"help": "Refuse to run if the kernel cannot restrict agent code in full."}
    )
    appworld_urls: list[str] | None = field(
        default=None, metadata={"help": "Running AppWorld environment servers, which replace the local processes."}
    )
    step_timeout_s: float = field(
        default=30.0, metadata={"help": "Seconds that one execution of the agent's code may take."}
    )
    observation_template: str | None = field(
        default=None,
        metadata={"help": "Text of the user's message that shows an observation; it must contain {observation}."},
    )
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Tokenizer to use instead of the model's own."}
    )
    chat_template_path: str | None = field(
        default=None, metadata={"help": "A Jinja file to use as the chat template."}
    )
    adapter_name_or_path: str | None = field(
        default=None, metadata={"help": "A trained adapter to evaluate, or to train further instead of a new one."}
    )
    eval_samples: int = field(default=1, metadata={"help": "Attempts at each task in `evaluate`."})
    report_path: str | None = field(
        default=None,
        metadata={"help": "File for the report of `evaluate`. Default: evaluation-<split>.json in output_dir."},
    )

    def __post_init__(self):
        for name in ("max_train_tasks", "max_eval_tasks", "max_episodes", "eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("difficulties", "eval_difficulties"):
            wrong = [level for level in getattr(self, name) or () if level not in (1, 2, 3)]
            if wrong:
                raise ValueError(f"{name}={getattr(self, name)}: AppWorld's difficulties are 1, 2 and 3")
        if self.step_timeout_s <= 0:
            raise ValueError(f"step_timeout_s={self.step_timeout_s} must be above 0")
