"""The pocket data: its families, its files, and every task in the real engine."""

import collections
import json
import random
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.pocket import families, generator
from tests.pocket.support import SPLITS, leaves, run_plays, task_file, task_ids

SHARED = {"genres", "priorities", "quantities", "last_names"}  # closed sets that all splits draw from


def write_pocket(venv: Path, root: Path, *options: str) -> subprocess.CompletedProcess:
    command = boot.command(venv / "bin" / "python", generator.__name__, "--root", str(root), *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def sampled(family: families.Family, seed: int = 0) -> dict:
    return family.sample(families.Draw(random.Random(seed), ("train",)))


@pytest.fixture(params=list(families.FAMILIES.values()), ids=lambda family: family.name)
def family(request) -> families.Family:
    return request.param


class TestFamilies:
    def test_there_are_enough_of_them(self):
        normal = [item for item in families.FAMILIES.values() if "train" in item.splits]
        assert len(normal) >= 10
        assert len({app for item in normal for app in item.apps}) >= 5
        assert {item.difficulty for item in normal} == {1, 2, 3}
        assert sum(item.documented is not None for item in normal) >= 3

    def test_every_value_is_in_a_closed_set(self, family):
        known = {value for values in families.closed_sets().values() for value in values}
        for seed in range(20):
            values = sampled(family, seed)
            assert set(leaves(values)) <= known
            for code in [*family.turns(values), *(slip.code for slip in family.wrong_ends(values))]:
                for literal in re.findall(r'"([A-Z][A-Za-z ]*|\d+)"', code):
                    assert set(literal.split()) <= known

    def test_values_are_single_words_and_the_sets_do_not_overlap(self):
        counts = collections.Counter(value for values in families.closed_sets().values() for value in set(values))
        repeated = {value for value, count in counts.items() if count > 1}
        assert not {value for value in repeated if not value.isdigit()}
        assert all(re.fullmatch(r"[A-Za-z0-9:.@]+", value) for value in counts)

    def test_the_solution_is_short_and_looks_at_docs_where_documented(self, family):
        values = sampled(family)
        turns = family.turns(values)
        assert 2 <= len(turns) <= 4
        assert all(len(turn) <= 320 and "complete_task" not in turn for turn in turns[:-1])
        assert "complete_task" in turns[-1]
        assert ("show_api_doc" in turns[0]) == (family.documented is not None)
        assert all(name in family.instruction(values) for name in family.documented or ())

    def test_there_is_a_slip_for_each_turn_and_something_to_miss(self, family):
        values = sampled(family)
        slips = family.slips(values)
        assert len(slips) == len(family.turns(values))
        assert all(slips), "a turn without a slip"
        assert all(
            slip.code != turn
            for turn, turn_slips in zip(family.turns(values), slips, strict=True)
            for slip in turn_slips
        )
        assert len(family.wrong_ends(values)) >= 2
        assert 3 <= len(family.tests) <= 5

    def test_pools_part_a_set(self):
        words = families.closed_sets()["words"]
        parts = [families.pool(words, name) for name in families.POOLS]
        assert [len(part) for part in parts] == [32, 16, 16]
        assert sorted(word for part in parts for word in part) == sorted(words)
        with pytest.raises(ValueError, match="'validation' is unknown; use train, dev, test"):
            families.pool(words, "validation")


class TestRoot:
    def test_splits_have_three_variants_a_scenario(self, pocket_root):
        counts = {}
        for split in SPLITS:
            ids = task_ids(pocket_root, split)
            counts[split] = len(ids)
            scenarios = collections.Counter(task_id[:7] for task_id in ids)
            assert set(scenarios.values()) == {3}
            assert all(re.fullmatch(r"[0-9a-f]{7}_[123]", task_id) for task_id in ids)
        assert counts == {"train": 72, "dev": 36, "test_normal": 72, "test_challenge": 24}
        assert len({task_id for split in SPLITS for task_id in task_ids(pocket_root, split)}) == sum(counts.values())

    def test_held_out_splits_show_values_that_train_never_shows(self, pocket_root):
        sets = families.closed_sets()
        shown = {}
        for split in SPLITS:
            shown[split] = set()
            for task_id in task_ids(pocket_root, split):
                shown[split] |= set(leaves(families.load_task(pocket_root, task_id)[1]))
        held_out = {value for kind, values in sets.items() if kind not in SHARED for value in values}
        for split in ("dev", "test_normal", "test_challenge"):
            assert not shown["train"] & shown[split] & held_out

    def test_the_challenge_has_families_and_apps_that_train_never_shows(self, pocket_root):
        loaded = {
            split: [families.load_task(pocket_root, task_id)[0] for task_id in task_ids(pocket_root, split)]
            for split in SPLITS
        }
        names = {split: {item.name for item in items} for split, items in loaded.items()}
        apps = {split: {app for item in items for app in item.apps} for split, items in loaded.items()}
        assert names["train"] == names["dev"] == names["test_normal"]
        assert not names["train"] & names["test_challenge"]
        assert {"file_system", "amazon", "splitwise"} <= apps["test_challenge"] - apps["train"]

    def test_a_task_says_what_the_engine_needs(self, pocket_root):
        for split in SPLITS:
            for task_id in task_ids(pocket_root, split):
                family, values = families.load_task(pocket_root, task_id)
                specs = task_file(pocket_root, task_id, "specs.json")
                assert specs["instruction"] == family.instruction(values)
                assert set(specs["supervisor"]) == {"first_name", "last_name", "email", "phone_number"}
                metadata = task_file(pocket_root, task_id, "ground_truth/metadata.json")
                assert metadata["difficulty"] == family.difficulty
                labels = [item["label"] for item in task_file(pocket_root, task_id, "ground_truth/test_data.json")]
                assert labels == ["no_op_fail"] * len(family.tests)

    def test_the_docs_app_has_something_to_serve(self, pocket_root):
        database = sqlite3.connect(pocket_root / "data" / "base_dbs" / "api_docs.db")
        assert database.execute("SELECT count(*) FROM api_docs").fetchone()[0] > 400
        database.close()


class TestCommand:
    def test_killed_in_the_middle_it_starts_over_and_the_same_seed_gives_the_same_files(
        self, pocket_root, appworld_venv, tmp_path
    ):
        root = tmp_path / "root"
        options = ["--root", str(root), "--train-scenarios", "1", "--dev-scenarios", "0", "--test-scenarios", "0"]
        options += ["--challenge-scenarios", "1", "--families", "requests_sort,mail_send,group_make"]
        command = boot.command(appworld_venv / "bin" / "python", generator.__name__, *options)
        process = subprocess.Popen(command)
        deadline = time.monotonic() + 120
        while not (root / generator.STAGING).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (root / generator.MARKER).is_file()
        assert not (root / "data").exists()

        assert subprocess.run(command, capture_output=True, text=True, timeout=300).returncode == 0
        written = sorted(path.relative_to(root / "data") for path in (root / "data").rglob("*") if path.is_file())
        assert len(written) > 9 * 20
        for path in written:
            if path.parts[0] != "datasets":
                assert (root / "data" / path).read_bytes() == (pocket_root / "data" / path).read_bytes(), path
        assert sorted(entry.name for entry in root.iterdir()) == ["data", generator.MARKER]

        again = write_pocket(appworld_venv, root, *options[2:])
        assert (again.returncode, "already there" in again.stdout) == (0, True)
        other = write_pocket(appworld_venv, root, *options[2:], "--seed", "1")
        assert (other.returncode, other.stdout) == (2, "")
        assert other.stderr == f"error: root {root} was made with seed 0, not 1; give a new folder\n"

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("memory/root", [], "has 'memory' in its path"),
            ("full", [], "holds 'precious.txt' and was not made by this command; give a new folder"),
            ("file", [], "is a file; give a folder"),
            ("new", ["--families", "note_anser"], "family 'note_anser' is unknown; use note_answer, "),
            ("new", ["--train-pools", "all"], "value pool 'all' is unknown; use train, dev, test"),
            ("new", ["--dev-scenarios", "-1"], "-1 scenarios a family for dev must be between 0 and 1000"),
        ],
    )
    def test_a_mistake_is_one_line(self, appworld_venv, tmp_path, name, options, message):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious.txt").write_text("mine")
        (tmp_path / "file").write_text("")
        result = write_pocket(appworld_venv, tmp_path / name, *options)
        assert result.returncode == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / name / "data").exists()
        assert (tmp_path / "full" / "precious.txt").read_text() == "mine"


def plays_of(root: Path, experiment: str) -> list[dict]:
    """Every task solved; of each family one task with all slips, with each wrong end, and as AppWorld verifies it."""
    plays, met = [], set()
    for split in SPLITS:
        for task_id in task_ids(root, split):
            family, values = families.load_task(root, task_id)
            turns = family.turns(values)
            play = {"task": task_id, "family": family.name}
            plays.append({**play, "tag": "solution", "turns": turns, "experiment": experiment})
            if family.name in met:
                continue
            met.add(family.name)
            sloppy = []
            for turn, slips in zip(turns, family.slips(values), strict=True):
                sloppy += [*(slip.code for slip in slips), turn]
            plays.append({**play, "tag": "sloppy", "turns": sloppy, "experiment": f"{experiment}_sloppy"})
            plays.append({**play, "tag": "compiled", "turns": [], "experiment": f"{experiment}_compiled"})
            for number, end in enumerate(family.wrong_ends(values)):
                play["label"] = end.label
                wrong = [*turns[:-1], end.code]
                plays.append({**play, "tag": "wrong", "turns": wrong, "experiment": f"{experiment}_wrong_{number}"})
    return plays


@pytest.fixture(scope="module")
def played(pocket_root, appworld_venv, experiment) -> dict[str, list[dict]]:
    """What came of all plays, by tag."""
    by_tag = collections.defaultdict(list)
    for record in run_plays(pocket_root, appworld_venv, plays_of(pocket_root, experiment)):
        by_tag[record["tag"]].append(record)
    return by_tag


@pytest.mark.slow
class TestEngine:
    def test_every_solution_passes_every_test_without_an_error(self, played):
        assert len(played["solution"]) == 204
        for record in played["solution"]:
            assert record["after"]["passed"] == record["after"]["total"], record
            assert record["completed"], record
            assert not [text for text in record["texts"] if text.startswith("Execution failed")], record

    def test_an_untouched_world_passes_no_test(self, played):
        for record in played["solution"]:
            assert record["before"]["passed"] == 0 < record["before"]["total"], record

    def test_observations_are_short(self, played):
        for record in played["solution"]:
            assert all(len(text) <= 120 for text in record["texts"]), record

    def test_looking_up_a_documented_api_shows_its_arguments(self, played):
        texts = {record["family"]: record["texts"][0] for record in played["solution"]}
        assert texts["alarm_set"].split()[:3] == ["time", "access_token", "repeat_days"]
        assert "is_completed" in texts["task_finish"]
        assert "member_emails" in texts["group_make"]

    def test_every_slip_fails_and_can_be_made_good(self, played, pocket_root):
        assert len(played["sloppy"]) == len(families.FAMILIES)
        for record in played["sloppy"]:
            family, values = families.load_task(pocket_root, record["task"])
            turns = set(family.turns(values))
            for code, text in zip(record["turns"], record["texts"], strict=True):
                assert text.startswith("Execution failed") == (code not in turns), (record["family"], code, text)
            assert record["after"]["passed"] == record["after"]["total"], record

    def test_a_wrong_end_completes_the_task_and_misses_something(self, played):
        partial = set()
        for record in played["wrong"]:
            assert record["completed"], record
            assert record["after"]["passed"] < record["after"]["total"], record
            partial.add(record["after"]["passed"] / record["after"]["total"])
        assert len(partial) >= 5, "partial scores of few kinds"

    def test_doing_nothing_and_bold_wrong_answers_earn_nothing(self, played):
        labels = {"nothing done", "no answer", "wrong note", "the title for an answer"}
        found = [record for record in played["wrong"] if record["label"] in labels]
        assert len(found) >= len(families.FAMILIES)
        for record in found:
            assert record["after"]["passed"] == 0, record

    def test_the_compiled_solution_passes_as_appworld_verifies_it(self, played):
        assert len(played["compiled"]) == len(families.FAMILIES)
        for record in played["compiled"]:
            assert record["after"]["passed"] == record["after"]["total"], record

    def test_the_official_evaluation_accepts_the_root(self, played, pocket_root, appworld_venv, experiment):
        command = [appworld_venv / "bin" / "appworld", "evaluate", experiment, "test_challenge", "--root", pocket_root]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        folder = pocket_root / "experiments" / "outputs" / experiment / "evaluations"
        report = json.loads((folder / "test_challenge.json").read_text())
        assert report["aggregate"] == {"task_goal_completion": 100.0, "scenario_goal_completion": 100.0}
        assert len(report["individual"]) == 24
