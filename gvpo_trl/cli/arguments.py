"""The fields of a configuration file that are neither TRL's `ModelConfig` nor `GVPOConfig`: data and environment.

Standard library only, like everything that the command line touches before it trains.
"""

from dataclasses import dataclass, field


@dataclass
class ScriptArguments:
    """What `gvpo-trl train` and `gvpo-trl evaluate` need beside the model and the trainer.

    Args:
        appworld_root (`str`, *optional*):
            Folder that holds AppWorld's `data/`. Without it, `APPWORLD_ROOT`, then the current folder.
        appworld_venv (`str`, *optional*):
            AppWorld's own virtual environment. Without it, `GVPO_APPWORLD_VENV`, then the user's cache folder.
        train_split (`str`, defaults to `"train"`):
            Split to train on.
        eval_split (`str`, *optional*, defaults to `"dev"`):
            Split to evaluate on, during training where `eval_strategy` asks for it and in `gvpo-trl evaluate`.
        difficulties (`list[int]`, *optional*):
            Difficulties to train on; all of them without it.
        eval_difficulties (`list[int]`, *optional*):
            Difficulties to evaluate on; all of them without it.
        max_train_tasks (`int`, *optional*):
            Keep the first so many training tasks.
        max_eval_tasks (`int`, *optional*):
            Keep the first so many evaluation tasks.
        prompt (`str`, defaults to `"react"`):
            Name of a prompt that ships with the package, or the path of a text file.
        max_episodes (`int`, *optional*, defaults to `16`):
            Worlds open at once; with `appworld_urls` as many as there are servers.
        isolation (`str`, *optional*, defaults to `"split"`):
            `"split"` runs agent code in a restricted interpreter, `"process"` beside the world.
        require_sandbox (`bool`, defaults to `False`):
            Refuse to run where the kernel cannot restrict the interpreter in full.
        appworld_urls (`list[str]`, *optional*):
            Addresses of running AppWorld environment servers to use in the place of local processes.
        step_timeout_s (`float`, defaults to `30.0`):
            Seconds that one execution of the agent's code may take.
        observation_template (`str`, *optional*):
            How an observation is written into the user's message; holds `{observation}`.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, where it is not the model's own.
        chat_template_path (`str`, *optional*):
            A Jinja file to use as the chat template.
        adapter_name_or_path (`str`, *optional*):
            A trained adapter to evaluate, or to train further in the place of a new one.
        eval_samples (`int`, defaults to `1`):
            Attempts at each task in `gvpo-trl evaluate` (evaluation while training: `num_generations_eval`).
        report_path (`str`, *optional*):
            Where `gvpo-trl evaluate` writes its report; without it, `evaluation-<split>.json` in `output_dir`.
    """

    appworld_root: str | None = field(
        default=None,
        metadata={"help": "Folder that holds AppWorld's data/. Without it: APPWORLD_ROOT, then the current folder."},
    )
    appworld_venv: str | None = field(
        default=None,
        metadata={"help": "AppWorld's own virtual environment. Without it: GVPO_APPWORLD_VENV, then your cache."},
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(
        default="dev",
        metadata={"help": "Split to evaluate on: while training where eval_strategy asks for it, and in `evaluate`."},
    )
    difficulties: list[int] | None = field(
        default=None, metadata={"help": "Difficulties to train on; all of them without it."}
    )
    eval_difficulties: list[int] | None = field(
        default=None, metadata={"help": "Difficulties to evaluate on; all of them without it."}
    )
    max_train_tasks: int | None = field(default=None, metadata={"help": "Keep the first so many training tasks."})
    max_eval_tasks: int | None = field(default=None, metadata={"help": "Keep the first so many evaluation tasks."})
    prompt: str = field(
        default="react", metadata={"help": "A prompt that ships with the package, or the path of a text file."}
    )
    max_episodes: int | None = field(
        default=None, metadata={"help": "Worlds open at once: 16, or with appworld_urls as many as there are servers."}
    )
    isolation: str | None = field(
        default=None,
        metadata={"help": "split (default): agent code in a restricted interpreter; process: beside the world."},
    )
    require_sandbox: bool = field(
        default=False, metadata={"help": "Refuse to run where the kernel cannot restrict agent code in full."}
    )
    appworld_urls: list[str] | None = field(
        default=None, metadata={"help": "AppWorld environment servers to use in the place of local processes."}
    )
    step_timeout_s: float = field(
        default=30.0, metadata={"help": "Seconds that one execution of the agent's code may take."}
    )
    observation_template: str | None = field(
        default=None,
        metadata={"help": "How an observation is written into the user's message; holds {observation}."},
    )
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Tokenizer, where it is not the model's own."}
    )
    chat_template_path: str | None = field(
        default=None, metadata={"help": "A Jinja file to use as the chat template."}
    )
    adapter_name_or_path: str | None = field(
        default=None, metadata={"help": "A trained adapter to evaluate, or to train on in the place of a new one."}
    )
    eval_samples: int = field(default=1, metadata={"help": "Attempts at each task in `evaluate`."})
    report_path: str | None = field(
        default=None,
        metadata={"help": "Where `evaluate` writes its report. Without it: evaluation-<split>.json in output_dir."},
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
