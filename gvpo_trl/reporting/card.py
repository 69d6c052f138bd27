"""What the model card says of the method."""

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
"""Title and citation, as TRL's trainers keep those of theirs."""


def name_local_base_model(card: Path) -> None:
    """Mend a card of TRL's: it names a base model that is a local folder `None`."""
    if card.is_file():
        text = card.read_text("utf-8").replace("[None](https://huggingface.co/None)", "a local model")
        card.write_text(text, "utf-8")
