"""Writes the pocket data: an AppWorld data root in the official layout, made by AppWorld's own model classes.

AppWorld's interpreter runs this file through `engine/boot.py`. It may import the standard library, `appworld` and the
modules beside it:

    <appworld venv>/bin/python -I boot.py gvpo_trl.pocket.generator --root DIR [--seed 0] [--train-scenarios 2] ...

The same settings give the same files. The data is built in a folder of its own and moved into place at the end. A run
that was killed therefore leaves no half-made data, and the next run starts over. `pocket.json` in the root holds the
settings that the root was made with.
"""

import argparse
import contextlib
import fcntl
import json
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

from gvpo_trl.pocket import families
from gvpo_trl.pocket.base_data import NOW, password, write_base
from gvpo_trl.pocket.families.plan import SPLITS

FORMAT = 2
"""Version of the content. Raise it when the same settings give other files than before."""
MARKER = "pocket.json"
STAGING = ".pocket-staging"
LOCK = ".pocket-lock"


class PocketError(Exception):
    """A user's mistake. The message says in one line what to do instead."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 when the root is there, 2 on a user's mistake."""
    try:
        options = parse(arguments)
        print(make_root(Path(options.root), settings_of(options)))
    except (PocketError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Write the pocket data, a small AppWorld data root.")
    parser.add_argument("--root", required=True, help="folder to write; new, empty, or made by this command before")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and sizes give the same files")
    for split, scenarios in zip(SPLITS, (2, 1, 2, 2), strict=True):
        option = "--" + split.replace("test_normal", "test").replace("test_challenge", "challenge") + "-scenarios"
        parser.add_argument(
            option,
            dest=split,
            type=int,
            default=scenarios,
            metavar="N",
            help=f"scenarios of {split} for each family, three tasks each (default {scenarios})",
        )
    parser.add_argument(
        "--train-pools",
        default="train",
        metavar="POOL,…",
        help="value pools that the train split draws from (default train, so that dev and test stay unseen)",
    )
    parser.add_argument("--families", default="", metavar="NAME,…", help="only these families (default all)")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> dict:
    """Check the options and return what the content of the root depends on."""
    names = [name for name in options.families.split(",") if name] or list(families.FAMILIES)
    for name in names:
        if name not in families.FAMILIES:
            raise PocketError(f"family {name!r} is unknown; use {', '.join(families.FAMILIES)}")
    scenarios = {split: getattr(options, split) for split in SPLITS}
    for split, count in scenarios.items():
        if not 0 <= count <= 1000:
            raise PocketError(f"{count} scenarios a family for {split} must be between 0 and 1000")
    pools = tuple(options.train_pools.split(","))
    families.pool((), *pools)  # raises for a pool that is unknown
    return {
        "format": FORMAT,
        "seed": options.seed,
        "scenarios": scenarios,
        "train_pools": list(pools),
        "families": names,
    }


def make_root(root: Path, settings: dict) -> str:
    """Write the data root unless it is there already, and return one line that says what was done.

    Raises:
        PocketError: the path cannot be used, or holds something else.
    """
    root = root.expanduser().absolute()
    if "memory" in str(root):
        raise PocketError(
            f"root {root} has 'memory' in its path, which AppWorld takes for a database in RAM; rename it"
        )
    check_root(root, settings)
    root.mkdir(parents=True, exist_ok=True)
    with lock(root):
        if check_root(root, settings):
            return f"{root}: already there, {describe(root / 'data')}"
        write_json(root / MARKER, settings)
        shutil.rmtree(root / STAGING, ignore_errors=True)
        build(root / STAGING, settings)
        (root / STAGING / "data").rename(root / "data")
        shutil.rmtree(root / STAGING)
    return f"{root}: written, {describe(root / 'data')}"


def check_root(root: Path, settings: dict) -> bool:
    """Return whether the root is there already, complete and made with these settings.

    Raises:
        PocketError: the path is something else, or a root that was made with other settings.
    """
    if not root.exists():
        return False
    if not root.is_dir():
        raise PocketError(f"root {root} is a file; give a folder")
    if not (root / MARKER).is_file():
        entries = [entry.name for entry in root.iterdir() if entry.name not in (LOCK, STAGING)]
        if entries:
            raise PocketError(f"root {root} holds {entries[0]!r} and was not made by this command; give a new folder")
        return False
    try:
        found = json.loads((root / MARKER).read_text(encoding="utf-8"))
    except ValueError:
        raise PocketError(f"{root / MARKER} is not JSON; delete the folder and run again") from None
    if not (root / "data").is_dir():
        return False
    if found != settings:
        key = next(key for key in settings if found.get(key) != settings[key])
        raise PocketError(f"root {root} was made with {key} {found.get(key)}, not {settings[key]}; give a new folder")
    return True


@contextlib.contextmanager
def lock(root: Path):
    """Hold the root's lock, so that two runs do not build it at the same time."""
    with open(root / LOCK, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    (root / LOCK).unlink(missing_ok=True)


def describe(data: Path) -> str:
    """Say how many tasks each split has."""
    counts = {split: len((data / "datasets" / f"{split}.txt").read_text().split()) for split in SPLITS}
    return ", ".join(f"{split} {count} tasks" for split, count in counts.items())


def build(root: Path, settings: dict) -> None:
    """Write everything below `root/data`."""
    from appworld import update_root
    from appworld.apps.api_lib import set_local_date_and_time

    (root / "data").mkdir(parents=True)
    update_root(str(root))
    freezer = set_local_date_and_time(NOW)
    try:
        write_api_docs(root)
        write_base(root, settings["seed"])
        tasks = families.plan(settings, families.FAMILIES)
        for rows in tasks.values():
            for task_id, family, values in rows:
                write_task(root / "data" / "tasks" / task_id, family, values, settings["seed"])
        for split, rows in tasks.items():
            write_text(root / "data" / "datasets" / f"{split}.txt", "".join(f"{row[0]}\n" for row in rows))
    finally:
        freezer.stop()


def write_api_docs(root: Path) -> None:
    """Write the API docs as JSON, in the form that AppWorld loads for a task."""
    from appworld.apps import get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.common.constants import CANARY_STRING

    for app, docs in ApiDocCollection.build(tuple(get_all_apps(skip_admin=True))).items():
        marked = {name: {**doc, "canary_string": CANARY_STRING} for name, doc in docs.items()}
        write_json(root / "data" / "api_docs" / "standard" / f"{app}.json", marked)


def write_task(folder: Path, family, values: dict, seed: int) -> None:
    """Write the folder of one task. The folder's name is the task's id."""
    from appworld.apps import get_all_apps
    from appworld.apps.model_lib import get_db_home_path
    from appworld.collections.models import ModelCollection

    models = ModelCollection.load(
        from_db_home_path=get_db_home_path(storage_type="disk", type="base"),
        to_db_home_path=get_db_home_path(storage_type="memory", type="task_input", task_id=folder.name),
        load_apps=get_all_apps(),
    )
    models.start_db_tracker()
    add_supervisor(models, family, values, seed)
    add_rows(models, family.rows(values))
    models.save(db_home_path=str(folder / "dbs"), format="changes")
    models.close()
    write_specs(folder, family, values)
    write_ground_truth(folder / "ground_truth", family, values)


def add_supervisor(models, family, values: dict, seed: int) -> None:
    """Create the supervisor app's records: the person who gives the task, the task, and the passwords."""
    person = family.supervisor(values)
    models.supervisor.Supervisor.create_save(
        first_name=person.first_name,
        last_name=person.last_name,
        email=person.email,
        phone_number=person.phone_number,
        birthday=person.birthday,
    )
    models.supervisor.Task.create_save(supervisor_id=1, instruction=family.instruction(values))
    for app in families.vocabulary.LOGIN_APPS:
        models.supervisor.AccountPassword.create_save(
            supervisor_id=1, account_name=app, password=password(seed, app, person.email)
        )


def add_rows(models, rows: list) -> None:
    """Create a task's own records, and resolve their references to earlier ones."""
    ids: dict[str, int] = {}
    for row in rows:
        fields = dict(row.fields)
        for key, value in fields.items():
            if isinstance(value, str) and value.startswith("@"):
                fields[key] = ids[value[1:]]
            elif key == "created_at":
                fields[key] = datetime.fromisoformat(value)
        record = models[row.app][row.model].create_save(**fields)
        if row.label:
            ids[row.label] = record.id


def write_specs(folder: Path, family, values: dict) -> None:
    """Write the part of a task that agents may read."""
    from appworld.common.constants import CANARY_STRING, DB_VERSION

    person = family.supervisor(values)
    specs = {
        "instruction": family.instruction(values),
        "supervisor": {
            "first_name": person.first_name,
            "last_name": person.last_name,
            "email": person.email,
            "phone_number": person.phone_number,
        },
        "datetime": NOW.isoformat(),
        "db_version": DB_VERSION,
        "canary_string": CANARY_STRING,
    }
    write_json(folder / "specs.json", specs)


def write_ground_truth(folder: Path, family, values: dict) -> None:
    """Write the tests, the data that they compare with, and the reference solution."""
    solution = family.solution(values)
    calls = set(re.findall(r"apis\.(\w+\.\w+)", solution))
    metadata = {
        "mode": "full",
        "difficulty": family.difficulty,
        "num_apps": len(family.apps),
        "num_apis": len(calls),
        "num_solution_code_lines": len(solution.splitlines()) - 1,
    }
    write_json(folder / "metadata.json", metadata)
    write_json(folder / "pocket.json", {"family": family.name, "values": values})
    write_json(folder / "required_apps.json", list(family.apps))
    write_json(folder / "public_data.json", values)
    write_json(folder / "private_data.json", family.private_data(values))
    write_json(folder / "answer.json", family.answer(values))
    write_json(
        folder / "test_data.json",
        [{"requirement": check.requirement, "label": check.label} for check in family.tests],
    )
    write_text(folder / "evaluation.py", family.evaluation())
    write_text(folder / "solution.py", solution)
    write_text(folder / "compiled_solution.py", solution)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, and make its folder."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
