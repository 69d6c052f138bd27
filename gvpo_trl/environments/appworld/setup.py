"""AppWorld's own virtual environment: makes it, finds it, checks it and runs the pocket generator in it.

AppWorld pins packages that TRL and vLLM cannot work with (pydantic below 2, an old FastAPI), so they never share an
environment.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.faults import SetupError
from gvpo_trl.pocket import generator

VERSION = "0.1.3.post1"
"""The one supported version: the hosts depend on its internals."""
PYTHONS = ((3, 11), (3, 13))
"""The oldest and the newest Python on which AppWorld's pinned dependencies can be installed."""
_REMEDY = "run `gvpo-trl appworld setup`"
_OFFLINE = re.compile(
    "NewConnectionError|Temporary failure in name|Network is unreachable|ConnectTimeout|ProxyError|from versions: none"
)


@dataclass(frozen=True, kw_only=True)
class AppWorldFacts:
    """What a check of AppWorld's environment found."""

    venv: Path
    python: str
    """Version of the environment's interpreter."""
    appworld: str
    """Version of the package in it."""
    root: Path | None = None
    """The data root that was tried, if any."""
    passed: int | None = None
    """Unit tests that pass on the untouched world of the root's first task."""
    failed: int | None = None
    """Unit tests that fail on it."""

    def __str__(self) -> str:
        lines = [f"AppWorld {self.appworld} on Python {self.python} in {self.venv}"]
        if self.root is not None:
            tests = f"{self.passed} of {self.passed + self.failed} tests pass on an untouched world"
            lines.append(f"data root {self.root}: a world opens, runs code and is evaluated ({tests})")
        return "\n".join(lines)


def check_platform() -> None:
    """Check that this is Linux, before anything is installed or forked.

    Raises:
        SetupError: it is another system.
    """
    if not sys.platform.startswith("linux"):
        raise SetupError(
            f"AppWorld's worlds are forked and restricted by Linux, and this is {sys.platform}: use Linux, a "
            "container or WSL 2 (the trainer, the viewer and load_tasks work here)"
        )


def default_venv() -> Path:
    """Return the folder of AppWorld's environment: `GVPO_APPWORLD_VENV`, or else a folder in the user's cache."""
    if named := os.environ.get("GVPO_APPWORLD_VENV"):
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "gvpo_trl" / f"appworld-{VERSION}"


def appworld_python(venv: Path | str | None = None) -> Path:
    """Check the files of AppWorld's environment, and return its interpreter.

    Raises:
        SetupError: the environment is missing, unfinished or holds another version.
    """
    path = _resolve(venv)
    if problem := _problem(path):
        raise SetupError(
            f"AppWorld's environment {str(path)!r} {problem}; {_REMEDY}, or name one in GVPO_APPWORLD_VENV"
        )
    return path / "bin" / "python"


def ensure_appworld(venv: Path | str | None = None) -> Path:
    """Make AppWorld's environment, or check the existing one; idempotent, and two processes may call it at once.

    Raises:
        SetupError: there is no supported Python or no network, the folder is something else, or a package is broken.
    """
    check_platform()
    path = _resolve(venv)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(path.name + ".lock")):
        if not _problem(path):
            return path
        if path.exists() and any(path.iterdir()) and not (path / "pyvenv.cfg").is_file():
            raise SetupError(f"{str(path)!r} is not empty and no virtual environment; name another folder")
        python = fitting_python()
        environment = _clean_environment(path)
        _call([python, "-m", "venv", "--clear", path], "cannot make the virtual environment", environment)
        pip = [path / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _call([*pip, f"appworld=={VERSION}"], f"cannot install appworld=={VERSION}", environment)
        _call([path / "bin" / "appworld", "install"], "`appworld install` failed", environment)
        check_installation(path)
    return path


def check_installation(venv: Path | str | None = None) -> AppWorldFacts:
    """Import AppWorld in its environment.

    Raises:
        SetupError: something is missing or does not work.
    """
    path = _resolve(venv)
    python = appworld_python(path)
    script = "import json, platform, appworld, appworld.apps.supervisor; "
    script += "print(json.dumps([platform.python_version(), appworld.__version__]))"
    environment = _clean_environment(path) | {"APPWORLD_ROOT": str(path)}
    output = _call([python, "-I", "-c", script], "AppWorld cannot be imported", environment)
    versions = json.loads(output.strip().splitlines()[-1])
    return AppWorldFacts(venv=path, python=versions[0], appworld=versions[1])


def make_pocket(root: Path | str, seed: int = 0, venv: Path | str | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Write the pocket data root with AppWorld's own model classes, in AppWorld's environment.

    Args:
        root: the folder that will hold `data/`.
        seed: the same seed gives the same data.
        venv: AppWorld's environment; `default_venv()` by default.
        extra: further arguments of the generator.

    Raises:
        SetupError: AppWorld's environment is missing, or the generator failed.
    """
    python = appworld_python(venv)
    path = Path(root).expanduser().absolute()
    command = boot.command(python, generator.__name__, "--root", str(path), "--seed", str(seed), *extra)
    _call(command, f"cannot write the pocket data to {str(path)!r}", _clean_environment(_resolve(venv)))
    return path


def _resolve(venv: Path | str | None) -> Path:
    return Path(venv).expanduser().absolute() if venv else default_venv()


def _problem(path: Path) -> str | None:
    """Return why an environment cannot be used, as far as its files show; `None` when they show no reason."""
    python = path / "bin" / "python"
    if not path.exists():
        return "is missing"
    if not os.access(python, os.X_OK):
        return "is broken: bin/python cannot be run"
    packages = next((path / "lib").glob("python3.*/site-packages"), None)
    found = sorted(packages.glob("appworld-*.dist-info")) if packages else []
    if not found:
        return "is unfinished: the package appworld is not installed in it"
    version = found[-1].name.removeprefix("appworld-").removesuffix(".dist-info")
    if version != VERSION:
        return f"holds appworld {version}, supported is {VERSION}"
    if not (packages / "appworld" / "apps" / "supervisor").is_dir():
        return "is unfinished: AppWorld's apps are not unpacked"
    return None


def fitting_python() -> str:
    """Return an interpreter on which AppWorld can be installed.

    Raises:
        SetupError: there is none.
    """
    oldest, newest = PYTHONS
    if oldest <= sys.version_info[:2] <= newest:
        return sys.executable
    for minor in range(newest[1], oldest[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise SetupError(
        f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot hold AppWorld, which needs "
        f"3.{oldest[1]} to 3.{newest[1]}; install one of these so that `python3.{oldest[1]}` is found"
    )


def _clean_environment(path: Path) -> dict[str, str]:
    dropped = ("PYTHON", "APPWORLD", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # `appworld install` unpacks its tests into its cache, by default in the user's home folder.
    return kept | {"APPWORLD_CACHE": str(path / "cache")}


def _call(command: list[Path | str], problem: str, environment: dict[str, str]) -> str:
    try:
        result = subprocess.run(
            [str(part) for part in command], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise SetupError(f"{problem}: {command[0]} cannot be run ({error.strerror})") from error
    if result.returncode == 0:
        return result.stdout
    output = f"{result.stdout}\n{result.stderr}".strip()
    if _OFFLINE.search(output):
        raise SetupError(f"{problem}: the package index cannot be reached; connect to the network and try again")
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")
    raise SetupError(f"{problem} (exit status {result.returncode}): {last}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl  # Windows has none, and gets an error that says so

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
