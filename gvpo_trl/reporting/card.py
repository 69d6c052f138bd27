"""Writes the model card: how to run the agent, what it reached, how it was trained, whom to cite.

TRL writes its card first, and its metadata, its links to trackers and its citation are kept. The rest is rendered from
`templates/`. The metadata are a model card's as huggingface_hub defines them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gvpo_trl.environments.base import TaskSource
from gvpo_trl.faults import SetupError
from gvpo_trl.reporting import card_facts
from gvpo_trl.reporting.plots import plot_run, series
from gvpo_trl.reporting.uploads import parse_benchmark, source_of
from gvpo_trl.rollout.budgets import OBSERVATION_TEMPLATE

PAPER = {
    "title": "Group Verification-based Policy Optimization for Interactive Coding Agents",
    "citation": (
        "@inproceedings{gvpo2026,\n"
        "    title     = {{Group Verification-based Policy Optimization for Interactive Coding Agents}},\n"
        "    booktitle = {International Conference on Learning Representations},\n"
        "    year      = 2026,\n"
        "    url       = {https://openreview.net/forum?id=RY47Tq0VsV},\n"
        "}"
    ),
}
"""Title and citation of the paper, in the form that TRL's trainers use for their model cards."""

FIGURE = "training_curves.png"
"""Name of the figure beside the model card."""
TEMPLATES = Path(__file__).with_name("templates")
METRICS = {
    "tgc": ("task_goal_completion", "Task goal completion (TGC), %"),
    "sgc": ("scenario_goal_completion", "Scenario goal completion (SGC), %"),
    "reward": ("reward", "Reward, mean share of passed tests"),
}
"""Type and name of each figure of an evaluation in the metadata."""
_BADGE = re.compile(r"^(\[<img .*?\)) *$", re.MULTILINE)


def write_model_card(trainer: Any, dataset_name: str | None = None) -> None:
    """Replace the model card that TRL has written in `output_dir` by ours, and write the figure beside it.

    With `hub_benchmark`, the evaluations are also written as `.eval_results/*.yaml`, which the Hub shows on the
    model's page and on the benchmark's leaderboard.

    Args:
        trainer: the `GVPOTrainer`, whose `log_history` holds the figures.
        dataset_name: id of the training data on the Hub, as `create_model_card` got it.
    """
    folder = Path(trainer.args.output_dir)
    trls = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    context = _context(trainer, folder, trls)
    context["card_data"] = _card_data(trls.data, context, dataset_name).to_yaml()
    card = ModelCard(_render("model_card.md", context))
    card.save(folder / "README.md")
    if trainer.args.hub_benchmark is not None:
        _write_eval_results(trainer.args.hub_benchmark, context, folder / ".eval_results")


def _context(trainer: Any, folder: Path, trls: ModelCard) -> dict[str, Any]:
    """Return the variables of the templates."""
    args, rollout = trainer.args, trainer.rollout_func
    source, name = source_of(rollout), Path(args.output_dir).absolute().name
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = card_facts.base_model(getattr(model.config, "_name_or_path", None))
    adapter_kind, adapter_settings = card_facts.adapter_of(model)
    # The rollout's context is not asked: with a vLLM server it needs every process, and one alone writes the card.
    budgets = rollout.budgets(args) if hasattr(rollout, "budgets") else args
    row = card_facts.first_row(trainer.train_dataset)
    prompt_name, system_text, has_system = card_facts.system_text(row, source)
    columns, failing, failing_note = card_facts.failing_steps(trainer.state.log_history)
    results = card_facts.evaluations(trainer)
    values = {
        "model_name": trls.data.model_name or name,
        "model_id": json.dumps(trainer.hub_model_id or args.hub_model_id or name),
        "base": base.label,
        "base_id": base.id,
        "data": source,
        "split": row.get("split"),
        "adapter_kind": adapter_kind,
        "budgets": budgets,
        "shaping": args.shaping,
        "observation_template": getattr(rollout, "observation_template", OBSERVATION_TEMPLATE),
        "prompt_name": prompt_name,
        "system_text": system_text,
        "has_system": has_system,
        "results": results,
        "results_note": _results_note(trainer, results),
        "settings": card_facts.settings(trainer, budgets, adapter_settings and f"{adapter_kind}, {adapter_settings}"),
        "failing_columns": columns,
        "failing": failing,
        "failing_note": failing_note,
        "versions": [*card_facts.versions(), *(source.versions if source else ())],
        "figure": _draw(trainer, folder / FIGURE),
        "badges": _BADGE.findall(trls.text),
        "citations": "## Citations" + trls.text.partition("## Citations")[2].rstrip() + "\n",
    }
    return values | {"snippet": _snippet(values, args)}


def _results_note(trainer: Any, results: list[dict[str, Any]]) -> str:
    """Return how the evaluations sampled, in words."""
    tasks = ", ".join(f"{row['name']}: {row['tasks']} tasks" for row in results if row["tasks"])
    attempts = trainer.num_generations_eval
    how = f"{attempts} attempt{'s' if attempts != 1 else ''} at each task, temperature {trainer.args.temperature:g}"
    return f"Sampled with {how}{f' ({tasks})' if tasks else ''}."


def _snippet(values: Mapping[str, Any], args: Any) -> str:
    """Return the Python code that runs the agent, with the sampling and the budgets of training."""
    sampled = ["do_sample=True", f"temperature={args.temperature}", f"top_k={max(args.top_k or 0, 0)}"]
    sampled += [
        f"{name}={getattr(args, name)}" for name in ("top_p", "min_p") if getattr(args, name) not in (None, 1, 0)
    ]
    template_kwargs = getattr(args, "chat_template_kwargs", None)
    split = next((row["split"] for row in values["results"] if row["split"]), values["split"] or "dev")
    options = {
        "sampling": ["do_sample=False"] if args.temperature == 0 else sampled,
        "chat_options": f", template_kwargs={template_kwargs!r}" if template_kwargs else "",
        "template_literal": json.dumps(values["observation_template"], ensure_ascii=False),
        "task_split": json.dumps(split),
        "prompt_option": f', prompt="{values["prompt_name"]}"' if values["prompt_name"] else "",
    }
    return _render("run_agent.py.jinja", {**values, **options}).rstrip()


def _draw(trainer: Any, path: Path) -> str | None:
    """Draw the curves of training and return the file's name; `None` for less than two points or no matplotlib.

    The card of a checkpoint that is not pushed has no figure, because drawing it would take most of the saving's time.
    """
    if trainer.is_in_train and not trainer.args.push_to_hub:
        return None
    if len(series(trainer.state.log_history, "reward")[0]) < 2:
        return None
    try:
        plot_run(trainer.state.log_history, path)
    except SetupError:
        return None
    return path.name


def _card_data(trls: ModelCardData, context: Mapping[str, Any], dataset_name: str | None) -> ModelCardData:
    """Return the metadata of the card: TRL's, with what TRL does not know."""
    adapter, base_id = context["adapter_kind"], context["base_id"]
    tags = list(dict.fromkeys([*sorted(trls.tags or ()), "agents", "code"]))
    if adapter:
        tags += [adapter.lower(), "transformers", *([f"base_model:adapter:{base_id}"] if base_id else [])]
    if context["data"] is not None:
        tags.append(context["data"].slug)
    return ModelCardData(
        model_name=context["model_name"],
        base_model=base_id,
        datasets=dataset_name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        eval_results=_eval_results(context["data"], context["results"]) or None,
    )


def _eval_results(source: TaskSource | None, results: list[dict[str, Any]]) -> list[EvalResult]:
    """Return the figures of the evaluations for the `model-index`."""
    name, slug = (source.name, source.slug) if source else ("tasks of an unknown source", "unknown")
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Interactive coding agent",
            dataset_type=slug,
            dataset_name=f"{name} ({row['name']})",
            dataset_split=row["split"],
            metric_type=metric,
            metric_name=title,
            metric_value=row[key],
        )
        for row in results
        for key, (metric, title) in METRICS.items()
        if row[key] is not None and row[key] == row[key]  # the Hub takes no NaN
    ]


def _write_eval_results(benchmark: str, context: Mapping[str, Any], folder: Path) -> None:
    """Write one file for each evaluated split, in the Hub's format for the results of benchmarks."""
    dataset_id, task = parse_benchmark(benchmark)
    name = context["data"].name if context["data"] else "tasks of an unknown source"
    for row in context["results"]:
        sgc = "" if row["sgc"] is None else f"; SGC {row['sgc']:.1f}"
        entry = EvalResultEntry(
            dataset_id=dataset_id,
            task_id=task or row["split"] or row["name"],
            value=row["tgc"],
            notes=f"TGC in % on {name} ({row['name']}){sgc}. {context['results_note']}",
        )
        folder.mkdir(exist_ok=True)
        file = folder / f"{dataset_id.split('/')[1]}-{row['name']}.yaml"
        file.write_text(yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False), "utf-8")


def _render(template: str, values: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
    )
    return environment.get_template(template).render(values)
