"""Puts the adapter that was trained where users and the Hub look for one: into the root of a saved folder.

PEFT writes the adapter named `default` there, whichever one was trained, and all others into subfolders.
"""

import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model

FILES = "adapter_*"
"""An adapter's configuration and weights."""


def put_trained_adapter_first(model: Any, folder: Path) -> None:
    """Copy the active adapter into the root of a folder that PEFT has saved, and the one there into a subfolder.

    A model without adapters, with several active ones, or whose active one is called `default` stays as it is. A
    resume takes the subfolders, so it finds every adapter under its name.

    Args:
        model: the unwrapped model.
        folder: the folder to which the model was saved.
    """
    active = getattr(model, "active_adapters", None) if is_peft_model(model) else None
    if not active or len(active) > 1 or active[0] == "default" or not (folder / active[0]).is_dir():
        return
    if "default" in model.peft_config:
        default = folder / "default"
        default.mkdir(exist_ok=True)
        for file in folder.glob(FILES):
            shutil.move(file, default / file.name)
    for file in (folder / active[0]).glob(FILES):
        shutil.copyfile(file, folder / file.name)
