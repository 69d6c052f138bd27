"""The entry point of the command line.

Each command imports its libraries in the function that runs it, so `--help` and `doctor` answer at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from gvpo_trl import __version__
from gvpo_trl.cli.errors import CommandError
from gvpo_trl.faults import EnvironmentFault, SetupError
from gvpo_trl.text import printable

_EPILOG = """\
`train` and `evaluate` take every field of the configuration file as --field value; `gvpo-trl train --help` lists them.
GVPO_DEBUG=1, or --debug before the command, shows the traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a check that failed, 2 for a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("GVPO_DEBUG", "0") not in ("", "0")
    if argv[:1] == ["--debug"]:
        debug, argv = True, argv[1:]
    try:
        return _dispatch(argv)
    except (CommandError, SetupError) as error:
        _report(f"error: {_brief(error)}", debug)
        return 2
    except EnvironmentFault as error:
        # The user did not cause this, but the fault's boundary and message say more than a traceback would.
        _report(f"the environment failed ({error.boundary}): {error}", debug)
        return 1
    except KeyboardInterrupt:
        print("gvpo-trl: interrupted", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if argv[:1] in (["train"], ["evaluate"]):
        return _run_configured(argv[0], argv[1:])
    arguments = _build_parser().parse_args(argv)
    return arguments.run(arguments)


def _report(message: str, debug: bool) -> None:
    """Print an error, which may quote an agent's text, with its traceback if the user debugs."""
    if debug:
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
    print(f"gvpo-trl: {printable(message)}", file=sys.stderr)


def _brief(error: Exception) -> str:
    """Return at most two lines of an error: its first line, and its last one, where quoted output names the cause."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return "\n".join(lines if len(lines) <= 2 else [lines[0], lines[-1]])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gvpo-trl",
        description="Train interactive coding agents with GVPO.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gvpo-trl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in (
        ("train", "train an agent: gvpo-trl train --config FILE [--field value …]"),
        ("evaluate", "evaluate a model or an adapter on a split: gvpo-trl evaluate --config FILE [--field value …]"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    _add_view(commands)
    doctor = commands.add_parser("doctor", help="list what is installed, and what to type for what is missing")
    doctor.set_defaults(run=_doctor)
    _add_appworld(commands)
    recipe = commands.add_parser(
        "recipe", help="write a recipe, with its model where it has one, into recipes/NAME here"
    )
    recipe.add_argument("name", metavar="NAME", nargs="?", help="the recipe; without a name they are listed")
    recipe.add_argument("--overwrite", action="store_true", help="write over files that are there")
    recipe.set_defaults(run=_recipe)
    return parser


def _add_view(commands: argparse._SubParsersAction) -> None:
    view = commands.add_parser("view", help="look at the trajectories of a run")
    view.add_argument("directory", metavar="RUN", help="the run's output_dir")
    view.add_argument("--task", metavar="ID", help="only attempts at this task")
    view.add_argument("--step", type=int, metavar="N", help="only what was sampled at this training step")
    view.add_argument("--mode", choices=("train", "eval"), help="only what was sampled to train, or to evaluate")
    view.add_argument("--failed", action="store_true", help="only trajectories with a failed step")
    view.add_argument("--last", type=int, default=1, metavar="N", help="show so many in full (default: %(default)s)")
    view.add_argument("--figure", metavar="FILE", help="draw the run's curves into this image instead")
    view.set_defaults(run=_view)


def _add_appworld(commands: argparse._SubParsersAction) -> None:
    appworld = commands.add_parser("appworld", help="set up AppWorld, make the small data set, check both")
    actions = appworld.add_subparsers(title="actions", required=True, metavar="ACTION")
    venv_help = "AppWorld's virtual environment (default: GVPO_APPWORLD_VENV, then the user's cache)"
    setup = actions.add_parser("setup", help="make AppWorld's virtual environment, or check the one that is there")
    setup.add_argument("--venv", metavar="DIR", help=venv_help)
    setup.set_defaults(run=_appworld_setup)
    pocket = actions.add_parser("pocket", help="write a small data root in AppWorld's layout, with tasks of our own")
    pocket.add_argument("--root", metavar="DIR", required=True, help="folder that will hold data/")
    pocket.add_argument("--seed", type=int, default=0, help="the same seed gives the same data (default: %(default)s)")
    pocket.add_argument("--venv", metavar="DIR", help=venv_help)
    pocket.set_defaults(run=_appworld_pocket)
    check = actions.add_parser("check", help="import AppWorld in its environment, and test a data root")
    check.add_argument("--root", metavar="DIR", help="data root to test: one world is opened, used and evaluated")
    check.add_argument("--venv", metavar="DIR", help=venv_help)
    check.set_defaults(run=_appworld_check)


def _run_configured(command: str, argv: list[str]) -> int:
    if not argv:
        raise CommandError(f"gvpo-trl {command} needs --config FILE; `gvpo-trl {command} --help` lists the fields")
    from gvpo_trl.cli.config import build_parser, parse_config

    if "--help" in argv or "-h" in argv:
        build_parser(command).print_help()
        return 0
    try:
        arguments = parse_config(command, argv)
    except (ValueError, OSError) as error:
        raise CommandError(error) from error
    from gvpo_trl.cli import run as commands

    if command == "evaluate":
        commands.evaluate(*arguments)
        return 0
    try:
        commands.train(*arguments)
    except KeyboardInterrupt:
        print(commands.how_to_resume(argv, arguments[1].output_dir), file=sys.stderr)
        raise
    return 0


def _view(arguments: argparse.Namespace) -> int:
    if arguments.figure is not None:
        return _draw(arguments.directory, arguments.figure)
    from gvpo_trl.reporting.viewer import view

    filters = {"step": arguments.step, "mode": arguments.mode, "failed": arguments.failed, "last": arguments.last}
    if arguments.last < 0:
        raise CommandError(f"--last {arguments.last} must be at least 0")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack an agent's characters
    try:
        for line in view(arguments.directory, task_id=arguments.task, **filters):
            print(line)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        raise CommandError(error) from error
    return 0


def _draw(run: str, file: str) -> int:
    from gvpo_trl.reporting.plots import plot_run, read_history

    try:
        print(f"figure in {plot_run(read_history(run), file, title=run)}")
    except (ValueError, OSError) as error:
        raise CommandError(error) from error
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from gvpo_trl.cli.doctor import examine, render

    findings = examine()
    print(printable(render(findings)))
    return 1 if any(finding.blocks for finding in findings) else 0


def _recipe(arguments: argparse.Namespace) -> int:
    from gvpo_trl.cli.recipe import recipe_names, write_recipe

    if arguments.name is None:
        print("\n".join(recipe_names()))
        return 0
    try:
        folder = write_recipe(arguments.name, Path.cwd(), overwrite=arguments.overwrite)
    except OSError as error:
        raise CommandError(error) from error
    print(f"{folder.relative_to(Path.cwd())} is here; its README.md has the commands")
    return 0


def _appworld_setup(arguments: argparse.Namespace) -> int:
    from gvpo_trl.environments.appworld.setup import ensure_appworld

    print(f"AppWorld is ready in {ensure_appworld(arguments.venv)}")
    return 0


def _appworld_pocket(arguments: argparse.Namespace) -> int:
    from gvpo_trl.environments.appworld.setup import make_pocket

    print(f"pocket data is in {make_pocket(arguments.root, seed=arguments.seed, venv=arguments.venv)}")
    return 0


def _appworld_check(arguments: argparse.Namespace) -> int:
    from gvpo_trl.environments.appworld.check import check_appworld

    print(check_appworld(arguments.venv, arguments.root))
    return 0
