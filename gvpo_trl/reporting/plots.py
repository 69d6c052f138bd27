"""Draws the curves of a run from the log that the Trainer keeps. matplotlib is imported where it is used."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gvpo_trl.faults import SetupError

_PANELS = (
    ("reward", "reward", "training reward"),
    ("tgc", "%", "held-out TGC"),
    ("steps/failed", "share", "failed steps"),
    ("entropy", "nats", "entropy"),
)


STATE = "trainer_state.json"
"""File of the Trainer's log, in each checkpoint and, where a script called `save_state`, in `output_dir`."""


def read_history(run: Path | str) -> list[dict[str, Any]]:
    """Read the log of a run from the checkpoint with the most optimizer steps.

    Args:
        run: `output_dir` of a run, or one of its checkpoints.

    Raises:
        FileNotFoundError: the run has saved no checkpoint yet.
        ValueError: a log is not the Trainer's.
    """
    files = [*Path(run).glob(STATE), *Path(run).glob(f"checkpoint-*/{STATE}")]
    if not files:
        raise FileNotFoundError(f"{run} holds no {STATE}; give the output_dir of a run that has saved a checkpoint.")
    states = [_read_state(file) for file in files]
    return max(states, key=lambda state: state["global_step"])["log_history"]


def _read_state(file: Path) -> dict[str, Any]:
    state = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(state, dict) or not {"global_step", "log_history"} <= state.keys():
        raise ValueError(f"{file} is not the state of a Trainer; remove it, or give a single checkpoint.")
    return state


def series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric in `trainer.state.log_history`."""
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
        history: `trainer.state.log_history`, or what `read_history` returns.
        path: image to write; its suffix chooses the format, and `.png` is added to a path without one.
        title: text above the four panels.
        held_out: (step, TGC) points that were measured before or after training.

    Returns:
        The path of the image.

    Raises:
        SetupError: matplotlib is not installed.
        ValueError: matplotlib cannot write the format.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SetupError('a figure needs matplotlib; pip install "gvpo-trl[plots]"') from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)  # this canvas needs no display, and no backend of the user's session
    for axes, (name, unit, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        if name == "tgc":
            for key in sorted({key for entry in history for key in entry if key.endswith("_tgc")}):
                which = key.removesuffix("_tgc").removeprefix("eval").lstrip("_") or "eval split"
                axes.plot(*series(history, key), marker="o", label=which)
            if held_out:
                axes.plot(*zip(*held_out, strict=True), marker="s", linestyle="--", label="before and after")
            if len(axes.lines) > 1:
                axes.legend(fontsize="small", frameon=False)
        else:
            axes.plot(*series(history, name))
        axes.set(title=label, xlabel="optimizer step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
