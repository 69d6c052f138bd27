"""Runs `gvpo-trl train` and `gvpo-trl evaluate` once their configuration is read: build, run, clean up."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gvpo_trl.cli.errors import CommandError

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase
    from trl import ModelConfig

    from gvpo_trl.cli.arguments import ScriptArguments
    from gvpo_trl.config import GVPOConfig
    from gvpo_trl.environments.appworld import AppWorldEnvironments
    from gvpo_trl.trainer import GVPOTrainer


def train(script_args: "ScriptArguments", training_args: "GVPOConfig", model_args: "ModelConfig") -> None:
    """Train, save, and push to the Hub if `push_to_hub` is set.

    The data is read and the environment is started before the model loads, so a mistake in either shows in seconds.

    Raises:
        CommandError: the user has to mend the configuration, the data or the environment.
    """
    from gvpo_trl.training.checks import check_sampling

    with _user_errors():
        check_sampling(training_args)
        checkpoint = resolve_checkpoint(training_args.resume_from_checkpoint, training_args.output_dir)
        train_dataset = _train_tasks(script_args)
        eval_dataset = _eval_tasks(script_args) if training_args.eval_strategy != "no" else None
    with _environments(script_args, training_args) as environments:
        with _user_errors():
            trainer = build_trainer(
                script_args,
                training_args,
                model_args,
                environments,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
            )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(training_args.output_dir)
        trainer.create_model_card()  # PEFT has just changed the card's metadata
        trainer.accelerator.print(f"saved in {training_args.output_dir}")
        if training_args.push_to_hub:
            trainer.push_to_hub()
            trainer.accelerator.print(f"pushed to the Hub as {trainer.hub_model_id}")
        trainer.end()


def evaluate(script_args: "ScriptArguments", training_args: "GVPOConfig", model_args: "ModelConfig") -> None:
    """Attempt every task of a split and write a report.

    Raises:
        CommandError: the user has to mend the configuration, the data or the environment.
    """
    from gvpo_trl.cli import evaluate as evaluation
    from gvpo_trl.evaluation import write_report

    with _user_errors():
        if script_args.eval_split is None:
            raise ValueError("eval_split is missing; name a split: train, dev, test_normal or test_challenge")
        dataset = _eval_tasks(script_args)
        settings = evaluation.settings_of(script_args, training_args, model_args, dataset)
        output_dir, rank = training_args.output_dir, training_args.process_index
        files = evaluation.choose_files(script_args.report_path, output_dir, settings, rank)
    training_args.eval_strategy = "no"  # the schedule is for evaluations during training
    with _environments(script_args, training_args) as environments:
        with _user_errors():
            trainer = build_trainer(script_args, training_args, model_args, environments, train_dataset=dataset)
        report = evaluation.run(trainer, dataset, files, script_args.eval_samples)
        if trainer.accelerator.is_main_process:
            write_report(report, files.report)
            errors = report["standard_errors"]
            for name in ("tgc", "sgc", "reward", "failed_step_share", "docs_step_share", "turns_per_task"):
                error = f" ± {errors[name]:.2g}" if name in errors else ""
                print(f"{name:18}  {report[name]:.4g}{error}")
            print(f"{report['attempts']} attempts at {report['tasks']} tasks, {report['unscorable']} without a score")
            print(f"report in {files.report}")


def build_trainer(
    script_args: "ScriptArguments",
    training_args: "GVPOConfig",
    model_args: "ModelConfig",
    environments: "AppWorldEnvironments",
    *,
    train_dataset: "Dataset | None" = None,
    eval_dataset: "Dataset | None" = None,
) -> "GVPOTrainer":
    """Build the trainer as a script would. TRL loads the model, quantizes it and adds a new adapter to it."""
    from trl import get_peft_config, get_quantization_config

    from gvpo_trl import GVPOTrainer, MultiTurnRollout

    rollout_options = {"observation_template": script_args.observation_template}
    rollout = MultiTurnRollout(environments, **{k: v for k, v in rollout_options.items() if v is not None})
    adapter = script_args.adapter_name_or_path

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return GVPOTrainer(
        model=load_adapter(adapter, training_args, model_args) if adapter else model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=load_tokenizer(script_args, training_args, model_args),
        rollout_func=rollout,
        quantization_config=None if adapter else get_quantization_config(model_args),
        peft_config=None if adapter else get_peft_config(model_args),
    )


def load_adapter(adapter: str, training_args: "GVPOConfig", model_args: "ModelConfig") -> "PeftModel":
    """Load the model with a trained adapter on it, which can be trained further.

    `GRPOTrainer` can load a model and add a new adapter, but it cannot load a trained adapter. The base model is
    therefore loaded here, with TRL's `create_model_from_path`.
    """
    from peft import PeftModel
    from trl import get_quantization_config
    from trl.trainer.utils import create_model_from_path

    options = dict(training_args.model_init_kwargs or {})
    if (quantization_config := get_quantization_config(model_args)) is not None:
        options["quantization_config"] = quantization_config
    if training_args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None  # `GRPOTrainer` does the same before it calls `create_model_from_path`
    model = create_model_from_path(model_args.model_name_or_path, **options)
    training_args.model_init_kwargs = None  # the trainer gets a model, and would warn that it ignores them
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def load_tokenizer(
    script_args: "ScriptArguments", training_args: "GVPOConfig", model_args: "ModelConfig"
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer that the configuration asks for; with `None` the trainer loads the model's own."""
    if script_args.tokenizer_name_or_path is None and script_args.chat_template_path is None:
        return None
    from transformers import AutoTokenizer

    own = script_args.tokenizer_name_or_path is None
    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer_name_or_path or model_args.model_name_or_path,
        revision=model_args.model_revision if own else "main",
        trust_remote_code=training_args.trust_remote_code,
        truncation_side="left",
        padding_side="left",
    )
    if script_args.chat_template_path is not None:
        tokenizer.chat_template = Path(script_args.chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def how_to_resume(argv: list[str], output_dir: str) -> str:
    """Return the line that an interrupted training ends with: the command that goes on from the last checkpoint.

    Args:
        argv: the arguments of `gvpo-trl train`.
        output_dir: the run's folder.
    """
    from gvpo_trl.training.resume import last_checkpoint

    checkpoint = last_checkpoint(output_dir)
    if checkpoint is None:
        return f"gvpo-trl: {output_dir} holds no checkpoint yet; save_steps says how often one is written"
    given = [argument for argument in argv if not argument.startswith("--resume_from_checkpoint=")]
    if "--resume_from_checkpoint" in given:
        position = given.index("--resume_from_checkpoint")
        del given[position : position + 2]
    command = shlex.join(["gvpo-trl", "train", *given, "--resume_from_checkpoint", "true"])
    return f"\ngvpo-trl: to go on from {Path(checkpoint).name}: {command}"


def resolve_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint folder to resume from: `true` means the last one in `output_dir`.

    Raises:
        ValueError: the checkpoint does not exist.
    """
    if wanted is None or str(wanted).lower() in ("false", "none", ""):
        return None
    from gvpo_trl.training.resume import last_checkpoint

    if str(wanted).lower() != "true":
        if not Path(wanted).is_dir():
            raise ValueError(f"resume_from_checkpoint={wanted} is no folder; `true` takes the last one in output_dir")
        return str(wanted)
    last = last_checkpoint(output_dir)
    if last is None:
        raise ValueError(
            f"resume_from_checkpoint=true, but {output_dir} holds no checkpoint; leave it out to start anew"
        )
    return last


def _train_tasks(script_args: "ScriptArguments") -> "Dataset":
    return _tasks(script_args, script_args.train_split, script_args.difficulties, script_args.max_train_tasks)


def _eval_tasks(script_args: "ScriptArguments") -> "Dataset | None":
    if script_args.eval_split is None:
        return None
    return _tasks(script_args, script_args.eval_split, script_args.eval_difficulties, script_args.max_eval_tasks)


def _tasks(script_args: "ScriptArguments", split: str, difficulties: list[int] | None, limit: int | None) -> "Dataset":
    from gvpo_trl.environments.appworld import load_tasks

    options: dict[str, Any] = {"root": script_args.appworld_root, "prompt": script_args.prompt}
    tasks = load_tasks(split, difficulties=tuple(difficulties) if difficulties else None, **options)
    return tasks if limit is None else tasks.select(range(min(limit, len(tasks))))


@contextmanager
def _environments(script_args: "ScriptArguments", training_args: "GVPOConfig") -> "Iterator[AppWorldEnvironments]":
    """Start the environments of a run, and close them however the run ends, also on SIGTERM."""
    from gvpo_trl.environments.appworld import AppWorldEnvironments

    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environments = None
    try:
        with _user_errors():
            given = {
                "urls": own_urls(script_args.appworld_urls, training_args),
                "venv": script_args.appworld_venv,
                "max_episodes": script_args.max_episodes,
                "isolation": script_args.isolation,
                "require_sandbox": script_args.require_sandbox or None,
            }
            environments = AppWorldEnvironments(
                root=script_args.appworld_root,
                step_timeout_s=script_args.step_timeout_s,
                **{name: value for name, value in given.items() if value is not None},
            )
            environments.start()
            print(environments.protection, flush=True)
        yield environments
    finally:
        if environments is not None:
            environments.close()
        signal.signal(signal.SIGTERM, previous)


def own_urls(urls: list[str] | None, training_args: "GVPOConfig") -> list[str] | None:
    """Return the servers of this process: each process of a distributed run gets its own.

    Raises:
        SetupError: there are fewer servers than processes.
    """
    if urls is None:
        return None
    from gvpo_trl.environments.appworld.http.environments import share_urls

    return share_urls(urls, training_args.process_index, training_args.world_size)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn an error during the set-up into a `CommandError`: the user can mend it.

    An error of the same class during training keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise CommandError(error) from error
