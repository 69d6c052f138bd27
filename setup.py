"""Puts the recipes into the wheel, as `gvpo_trl/recipes`; everything else about the package is in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies `recipes/` beside the package's modules."""

    def run(self) -> None:
        """Build, and add the recipes unless the package stays where it is."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "gvpo_trl", "recipes")
            ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(Path(__file__).parent / "recipes", target, ignore=ignore, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
