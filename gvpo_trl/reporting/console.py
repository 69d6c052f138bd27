"""Shows one readable line per generation and per evaluation in place of the dictionary of all metrics.

All metrics stay in `state.log_history` and in the trackers. `GVPOTrainer` exchanges the Trainer's default callback for
the one here with the same kind of progress bar. `remove_callback` takes it away, and brings the dictionary back with
`add_callback(ProgressCallback)`:

    trainer.remove_callback(ConsoleLines)
    trainer.add_callback(transformers.ProgressCallback)
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from gvpo_trl.text import printable_line

FIGURES = (
    ("reward", "reward", 1, "{:.3f}"),
    ("TGC", "tgc", 1, "{:.1f} %"),
    ("TGC", "rollout/task_goal_completion", 100, "{:.1f} %"),
    ("SGC", "sgc", 1, "{:.1f} %"),
    ("failed steps", "steps/failed", 100, "{:.0f} %"),
    ("turns", "rollout/turns", 1, "{:.1f}"),
    ("tokens", "completions/mean_length", 1, "{:.0f}"),
    ("KL", "kl", 1, "{:.2g}"),
    ("entropy", "entropy", 1, "{:.2f}"),
    ("s", "runtime", 1, "{:.1f}"),
    ("s/step", "step_time", 1, "{:.1f}"),
)
"""The figures of a line: name, metric without prefix, factor and format. The first metric of a name that is there."""
TROUBLES = (("out of tokens", "stop/max_tokens"), ("unscorable", "rollout/unscorable"))
"""Shares that a line names only where they are not 0."""


class ConsoleLines(TrainerCallback):
    """Base of the callbacks that write lines, so that one name removes whichever is in use."""


class ProgressLines(ProgressCallback, ConsoleLines):
    """Writes the lines above the Trainer's progress bar."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the line of what was logged."""
        if state.is_world_process_zero and (text := line(logs or {}, state.global_step, state.max_steps)):
            tqdm.write(text)


class PrintedLines(PrinterCallback, ConsoleLines):
    """Prints the lines where `disable_tqdm` turns progress bars off."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print the line of what was logged."""
        if state.is_world_process_zero and (text := line(logs or {}, state.global_step, state.max_steps)):
            print(text, flush=True)


def write_lines(handler: CallbackHandler) -> None:
    """Exchange the callback that the Trainer has added last, if it is a default one, for one that writes lines."""
    kinds = {ProgressCallback: ProgressLines, PrinterCallback: PrintedLines}
    default = type(handler.callbacks[-1])
    if default.__name__ == "NotebookProgressCallback":
        kinds[default] = notebook_lines(default)
    if default in kinds:
        handler.callbacks[-1] = kinds[default]()


def notebook_lines(default: type[TrainerCallback]) -> type[TrainerCallback]:
    """Return a class like the Trainer's callback for notebooks, whose table has the few columns of a line.

    Args:
        default: transformers' `NotebookProgressCallback`, which can be imported only where IPython is installed.
    """

    class NotebookLines(default, ConsoleLines):
        """Writes the figures into the table of a notebook."""

        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            self.training_tracker.inner_table = None  # its columns come with the first row

        def on_log(self, args, state, control, logs=None, **kwargs):
            prefix = prefix_of(logs or {})
            if self.training_tracker is not None and prefix == "":
                self.training_tracker.write_line({"Step": f"{state.global_step}", **dict(figures(logs, prefix))})

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            prefix = prefix_of(metrics or {})
            shown = {
                "Step": f"{state.global_step} {(prefix or '').strip('_')}",
                **dict(figures(metrics or {}, prefix or "")),
            }
            if self.training_tracker is None:  # an evaluation outside of a training has a table of its own
                from transformers.utils import notebook  # it can be imported only where IPython is installed

                table = notebook.text_to_html_table([list(shown), list(shown.values())])
                notebook.disp.display(notebook.disp.HTML(table))
                self.prediction_bar = None
                return
            self.training_tracker.write_line(shown)
            self.training_tracker.remove_child()
            self.prediction_bar, self._force_next_update = None, True

    return NotebookLines


def line(logs: Mapping[str, Any], step: int, steps: int) -> str | None:
    """Return the line of what was logged, or `None` for the log of an optimizer step without a new generation.

    Args:
        logs: the logged metrics.
        step: the number of optimizer steps so far.
        steps: the number of optimizer steps of the training; 0 outside of a training.
    """
    if "train_runtime" in logs:
        return f"trained to step {step} in {logs['train_runtime']:.0f} s"
    prefix = prefix_of(logs)
    if prefix is None:
        if "loss" in logs and "learning_rate" in logs:
            return None
        values = (f"{printable_line(str(name))} {_text(value)}" for name, value in logs.items() if name != "epoch")
        return " · ".join(values) or None
    name = f"{prefix.rstrip('_')}: " if prefix else ""
    place = f"step {step}/{steps}" if steps else f"step {step}"
    return f"{place}  {name}" + " · ".join(_words(*figure) for figure in figures(logs, prefix))


def prefix_of(logs: Mapping[str, Any]) -> str | None:
    """Return the prefix of a rollout's metrics: "" in training, else such as "eval_"; `None` without a rollout."""
    if "reward" in logs:
        return ""
    return next((name.removesuffix("reward") for name in logs if name.endswith("_reward")), None)


def figures(logs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each figure that was logged."""
    shown = set()
    for name, metric, factor, form in FIGURES:
        value = logs.get(prefix + metric)
        if isinstance(value, int | float) and name not in shown:
            shown.add(name)
            yield name, form.format(factor * value)
    for name, metric in TROUBLES:
        if share := logs.get(prefix + metric):
            yield name, f"{100 * share:.0f} %"


def _words(name: str, text: str) -> str:
    return f"{text} {name}" if name in ("s", "s/step", "turns", "tokens") else f"{name} {text}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable_line(str(value))
