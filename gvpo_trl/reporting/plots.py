"""Figures of a run, from the log that the Trainer keeps. matplotlib is imported where it is used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PANELS = (
    ("reward", "reward", "training reward"),
    ("tgc", "%", "held-out TGC"),
    ("steps/failed", "share", "failed steps"),
    ("entropy", "nats", "entropy"),
)


def series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric in `trainer.state.log_history`."""
    points = [(entry["step"], entry[name]) for entry in history if name in entry and "step" in entry]
    return [step for step, _ in points], [value for _, value in points]


def plot_run(
    history: Sequence[Mapping[str, Any]],
    path: Path | str,
    *,
    title: str = "",
    held_out: Sequence[tuple[int, float]] = (),
) -> Path:
    """Draw reward, held-out TGC, share of failed steps and entropy over the optimizer steps.

    Args:
        history: `trainer.state.log_history`, or that of a checkpoint's `trainer_state.json`.
        path: image to write; its ending says which kind.
        title: above the four panels.
        held_out: (step, TGC) points measured outside the training, drawn beside the evaluations in it.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user's session has
    for axes, (name, unit, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        if name == "tgc":
            if any("eval_tgc" in entry for entry in history):
                axes.plot(*series(history, "eval_tgc"), marker="o", label="while training (eval split)")
            if held_out:
                axes.plot(*zip(*held_out, strict=True), marker="s", linestyle="--", label="before and after")
            if axes.lines:
                axes.legend()
        else:
            axes.plot(*series(history, name))
        axes.set(title=label, xlabel="optimizer step", ylabel=unit)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
