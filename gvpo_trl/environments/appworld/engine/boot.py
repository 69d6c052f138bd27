"""Runs a module of this package in AppWorld's virtual environment, where the package is not installed.

The trainer's side starts it by path as `<appworld venv>/bin/python -I boot.py MODULE [ARGUMENT …]`; MODULE is the
full name of a module with a function `main`. No other code loads the package by its path. The package keeps its own
name, so its modules import each other as they do everywhere. Its folder is not put on `sys.path`: that would be the
trainer's `site-packages`, whose libraries must not be found here.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = "gvpo_trl"


def command(python: Path | str, module: str, *arguments: str) -> list[str]:
    """Return the command with which AppWorld's interpreter `python` calls a module's `main`."""
    return [str(python), "-I", __file__, module, *arguments]


def load_package() -> None:
    """Make `import gvpo_trl` work for the package that this file belongs to, and for nothing beside it."""
    folder = Path(__file__).resolve().parents[3]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])


if __name__ == "__main__":
    load_package()
    module = importlib.import_module(sys.argv.pop(1))
    sys.exit(module.main())
