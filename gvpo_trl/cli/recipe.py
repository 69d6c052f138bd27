"""`gvpo-trl recipe NAME`: writes a recipe of the package into the current folder."""

import shutil
from pathlib import Path

from gvpo_trl.cli.errors import CommandError

PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path:
    """Return the folder of the recipes: inside an installed package, beside the package in a clone."""
    for folder in (PACKAGE / "recipes", PACKAGE.parent / "recipes"):
        if (folder / "README.md").is_file():
            return folder
    raise CommandError(f"{PACKAGE} holds no recipes; install gvpo-trl again, or take them from a clone")


def recipe_names() -> list[str]:
    """Return the names of the recipes."""
    return sorted(path.name for path in recipes_folder().iterdir() if (path / "README.md").is_file())


def write_recipe(name: str, folder: Path, *, overwrite: bool = False) -> Path:
    """Copy a recipe to `folder/recipes/NAME`, the place that its configuration and its README speak of.

    Raises:
        CommandError: there is no such recipe, or the place is taken.
    """
    source = recipes_folder() / name
    if name not in recipe_names():
        raise CommandError(f"there is no recipe {name!r}; choose one of {', '.join(recipe_names())}")
    target = folder / "recipes" / name
    if target.resolve() == source.resolve():
        return target
    if target.exists() and not overwrite:
        raise CommandError(f"{target} exists; move it away, or write over it with --overwrite")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=overwrite)
    return target
