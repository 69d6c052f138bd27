"""What the model card says about the method."""

from pathlib import Path

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


def name_local_base_model(card: Path) -> None:
    """Correct a model card by TRL, which calls a base model from a local folder `None`."""
    if card.is_file():
        text = card.read_text("utf-8").replace("[None](https://huggingface.co/None)", "a local model")
        card.write_text(text, "utf-8")
