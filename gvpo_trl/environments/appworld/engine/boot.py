"""Runs a module of this package in AppWorld's virtual environment, where the package is not installed.

The trainer's side starts it by path as `<appworld venv>/bin/python -I boot.py MODULE [ARGUMENT …]`; MODULE is the
full name of a module with a function `main`. No other code loads the package by its path. The package keeps its own
name, so its modules import each other as they do everywhere. Its folder is not put on `sys.path`: that would be the
trainer's `site-packages`, whose libraries must not be found here.
"""

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

PACKAGE = "gvpo_trl"


def command(python: Path | str, module: str, *arguments: str) -> list[str]:
    """Return the command with which AppWorld's interpreter `python` calls a module's `main`."""
    return [str(python), "-I", __file__, module, *arguments]


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module whose functions keep Python's builtins when agent code replaces them in `builtins`."""

    def exec_module(self, module) -> None:
        """Run the module's code with a copy of the builtins."""
        module.__builtins__ = dict(vars(builtins))
        super().exec_module(module)


class Finder:
    """Finds the modules of this package for `Loader`; an entry of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path, target=None):
        """Return the specification of a module of this package, and `None` for any other name."""
        if not name.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin)
        return spec


def load_package() -> None:
    """Make `import gvpo_trl` work for the package that this file belongs to, and for nothing beside it."""
    folder = Path(__file__).resolve().parents[3]
    file = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, file, loader=Loader(PACKAGE, str(file)), submodule_search_locations=[str(folder)]
    )
    sys.meta_path.insert(0, Finder)
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])


if __name__ == "__main__":
    load_package()
    module = importlib.import_module(sys.argv.pop(1))
    sys.exit(module.main())
