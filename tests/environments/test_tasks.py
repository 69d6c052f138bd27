"""Tests of the tasks as a dataset: its columns, its prompts, and the errors that mistakes get."""

import json
import shutil
import sys

import pytest

from gvpo_trl.environments.appworld import load_tasks
from gvpo_trl.environments.appworld.tasks import PROMPTS, check_root
from gvpo_trl.faults import SetupError
from tests.environments.support import split_ids


@pytest.fixture(scope="module")
def small_root(pocket_root, tmp_path_factory):
    """A root that tests may damage, with three tasks of the pocket data and without databases."""
    root = tmp_path_factory.mktemp("root")
    for name in ("datasets", "tasks", "base_dbs", "api_docs"):
        (root / "data" / name).mkdir(parents=True)
    ids = split_ids(pocket_root)[:3]
    for task_id in ids:
        shutil.copytree(pocket_root / "data" / "tasks" / task_id, root / "data" / "tasks" / task_id)
    (root / "data" / "datasets" / "train.txt").write_text("\n".join(ids) + "\n")
    (root / "data" / "datasets" / "empty.txt").write_text("\n")
    return root


def test_columns_and_prompts(pocket_root):
    tasks = load_tasks("train", root=pocket_root)
    assert tasks.column_names == ["prompt", "task_id", "scenario", "difficulty", "instruction", "datetime", "split"]
    assert tasks["task_id"] == split_ids(pocket_root) and set(tasks["split"]) == {"train"}
    row = tasks[0]
    specs = json.loads((pocket_root / "data" / "tasks" / row["task_id"] / "specs.json").read_text())
    system, user = row["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    for value in [*specs["supervisor"].values(), specs["instruction"]]:
        assert value in user["content"]
    assert specs["supervisor"]["email"] in system["content"] and "```python" in system["content"]
    assert "$" not in system["content"] and row["scenario"] == row["task_id"].split("_")[0]


def test_ids_difficulties_and_the_root_from_the_environment(pocket_root, monkeypatch):
    monkeypatch.setenv("APPWORLD_ROOT", str(pocket_root))
    ids = split_ids(pocket_root, "dev")[:2]
    assert load_tasks(ids)["task_id"] == ids
    assert load_tasks(ids)["split"] == [None, None]
    assert set(load_tasks("train", difficulties=(1, 2))["difficulty"]) == {1, 2}


def test_the_compact_prompt_is_three_sentences_at_most(pocket_root):
    text = load_tasks("train", root=pocket_root, prompt="compact")[0]["prompt"][0]["content"]
    assert len(text) < 500 and "complete_task" in text


def test_a_template_of_ones_own(pocket_root, tmp_path):
    template = tmp_path / "mine.txt"
    template.write_text("Help $first_name for $$5.")
    row = load_tasks("train", root=pocket_root, prompt=template)[0]
    assert row["prompt"][0]["content"].startswith("Help ") and row["prompt"][0]["content"].endswith(" for $5.")
    template.write_text("Help $name.")
    with pytest.raises(SetupError, match=r"\$name, which nothing fills; allowed are \$first_name"):
        load_tasks("train", root=pocket_root, prompt=template)
    template.write_text("costs $ 5")
    with pytest.raises(SetupError, match=r"'\$\$' for a dollar sign"):
        load_tasks("train", root=pocket_root, prompt=template)
    with pytest.raises(SetupError, match="neither one of"):
        load_tasks("train", root=pocket_root, prompt="reakt")


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("trian", {}, "split 'trian' is unknown; there are"),
        ("../tasks", {}, "is unknown"),
        (["nope_1"], {}, "task_id='nope_1' is unknown"),
        (["../datasets"], {}, "is unknown"),
        ([""], {}, "is unknown"),
        ("empty", {}, "'empty' holds no tasks"),
        ([], {}, "holds no tasks"),
        ("train", {"difficulties": (9,)}, "of difficulties"),
        ("train", {"root": "/nowhere"}, "gvpo-trl appworld pocket --root DIR"),
    ],
)
def test_mistakes(small_root, split, options, message):
    with pytest.raises(SetupError, match=message) as raised:
        load_tasks(split, **({"root": small_root} | options))
    assert len(str(raised.value).splitlines()) <= 2


def test_an_unknown_task_names_the_nearest(small_root):
    known = split_ids(small_root)[0]
    with pytest.raises(SetupError, match=known):
        load_tasks([known[:-1] + "7"], root=small_root)


def test_data_of_another_version_and_damaged_data(small_root, tmp_path):
    root = tmp_path / "other"
    shutil.copytree(small_root, root)
    specs = root / "data" / "tasks" / min(split_ids(root)) / "specs.json"
    kept = specs.read_text()
    specs.write_text(kept.replace('"0.1.0"', '"0.2.0"'))
    with pytest.raises(SetupError, match=r"db_version '0\.2\.0'.*'0\.1\.0'"):
        check_root(root)
    specs.write_text("{")
    with pytest.raises(SetupError, match="cannot be read"):
        check_root(root)
    shutil.rmtree(root / "data" / "tasks")
    (root / "data" / "tasks").mkdir()
    with pytest.raises(SetupError, match="has no tasks"):
        check_root(root)
    renamed = tmp_path / "memory"
    shutil.copytree(small_root, renamed)
    with pytest.raises(SetupError, match="'memory'"):
        check_root(renamed)


def test_tasks_without_ground_truth_have_no_difficulty(small_root, tmp_path):
    root = tmp_path / "blind"
    shutil.copytree(small_root, root)
    for folder in (root / "data" / "tasks").iterdir():
        shutil.rmtree(folder / "ground_truth")
    assert load_tasks("train", root=root)["difficulty"] == [None] * 3


def test_the_answers_are_never_read(small_root):
    opened, watching = [], [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None)
    load_tasks("train", root=small_root)
    watching.clear()  # a hook stays for the life of the process
    read = {name.rpartition("/")[2] for name in opened if str(small_root) in name}
    assert read == {"train.txt", "specs.json", "metadata.json"}


def test_prompts_are_packaged():
    assert {path.name for path in PROMPTS.iterdir()} >= {"react.txt", "compact.txt"}
