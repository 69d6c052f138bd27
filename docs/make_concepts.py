"""Draws `docs/concepts.svg`: one trajectory and its advantages, computed by `gvpo_trl.objective`.

python docs/make_concepts.py
"""

from pathlib import Path

import matplotlib
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gvpo_trl.objective import outcome_advantages, shape_advantages

SEGMENTS = (
    ("prompt", 0, "the task", 3),
    ("turn 1", 1, "looks up the API", 3),
    ("observation", 0, "the documentation", 2.6),
    ("turn 2", 2, "raises KeyError", 3),
    ("observation", 0, "the traceback", 2.6),
    ("turn 3", 1, "completes the task", 3),
)
"""Name, kind (0 not sampled, 1 executed, 2 failed), words, and drawn width of each part of the trajectory."""
GROUPS = {"the trajectory wins": (1.0, 0.0), "its group ties": (1.0, 1.0), "the trajectory loses": (0.0, 1.0)}
"""Rewards of the drawn trajectory and of the other one in its group of two."""
COLORS = {0: "#e9e9e9", 1: "#cfe3f7", 2: "#f7cfcf"}


def advantages(rewards: tuple[float, float]) -> tuple[float, list[float]]:
    """Return the outcome advantage of the first trajectory, and the GVPO advantage of each of its parts."""
    outcome = outcome_advantages(torch.tensor(rewards), 2)
    kinds = torch.tensor([[kind for _, kind, _, _ in SEGMENTS]] * 2)
    shaped = shape_advantages(outcome, kinds > 0, kinds == 2, penalty=0.2, mode="multiplicative")
    return outcome[0].item(), shaped[0].tolist()


def number(value: float) -> str:
    """Return an advantage as the figure shows it."""
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}") if value else "0"


def draw() -> Figure:
    """Draw the figure."""
    figure = Figure(figsize=(9.5, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    width = sum(segment[3] for segment in SEGMENTS)
    start = 0
    results = {label: advantages(rewards) for label, rewards in GROUPS.items()}
    for position, (name, kind, words, wide) in enumerate(SEGMENTS):
        axes.add_patch(Rectangle((start, 6.2), wide - 0.08, 1.6, color=COLORS[kind]))
        axes.text(start + wide / 2, 7.2, name, ha="center", va="center", fontsize=9)
        axes.text(start + wide / 2, 6.6, words, ha="center", va="center", fontsize=7.5, color="#444")
        for row, (outcome, values) in enumerate(results.values()):
            height = 4.9 - 1.2 * row
            shown = f"{number(outcome)}  →  {number(values[position])}" if kind else "·"
            axes.text(start + wide / 2, height, shown, ha="center", va="center", fontsize=9)
        start += wide
    for row, label in enumerate(GROUPS):
        axes.text(-0.2, 4.9 - 1.2 * row, label, ha="right", va="center", fontsize=9)
    axes.set(xlim=(-4, width), ylim=(1.9, 8))
    axes.axis("off")
    return figure


def main() -> None:
    """Write the figure beside this script."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gvpo"})
    draw().savefig(Path(__file__).with_name("concepts.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
