"""`gvpo-trl evaluate` writes as it goes, and goes on where it stopped."""

import json
from pathlib import Path

import pytest

from gvpo_trl.cli.evaluate import EvaluationFiles, choose_files
from gvpo_trl.cli.main import main
from gvpo_trl.environments.base import Score
from gvpo_trl.rollout.types import StopReason, Trajectory
from gvpo_trl.training.outcomes import Outcome, standard_errors

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"split": "dev", "seed": 0, "temperature": 1.0, "versions": {"trl": "1"}, "processes": 1}


def trajectory(task_id="a_1", passed=1, failed=0):
    score = Score(passed=("x",) * passed, failed=("y",) * failed)
    return Trajectory(task_id=task_id, messages=[], prompt_ids=[1], steps=[], stop=StopReason.COMPLETED, score=score)


def attempts_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_an_attempt_is_on_disk_as_soon_as_it_ends(tmp_path):
    files = EvaluationFiles(tmp_path / "evaluation-dev.json", SETTINGS)
    files.append(3, trajectory())
    files.append(0, trajectory("a_2", failed=1))
    head, first, second = attempts_of(files.attempts)
    assert head["settings"]["seed"] == 0
    assert (first["attempt"], first["success"], second["attempt"], second["success"]) == (3, True, 0, False)
    assert set(EvaluationFiles(files.report, SETTINGS).outcomes()) == {0, 3}


def test_a_line_that_a_kill_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    files = EvaluationFiles(tmp_path / "evaluation-dev.json", SETTINGS)
    for number in range(3):
        files.append(number, trajectory())
    files.attempts.write_bytes(files.attempts.read_bytes()[:-20])
    again = EvaluationFiles(files.report, SETTINGS)
    assert set(again.outcomes()) == {0, 1}
    again.append(2, trajectory())
    assert set(again.outcomes()) == {0, 1, 2}


def test_an_evaluation_has_files_of_its_own(tmp_path):
    first = choose_files(None, str(tmp_path), SETTINGS, 0)
    first.append(0, trajectory())
    assert choose_files(None, str(tmp_path), SETTINGS, 0).report == first.report, "it goes on"
    other = choose_files(None, str(tmp_path), SETTINGS | {"seed": 1}, 0)
    assert other.report.name == "evaluation-dev-2.json", "other settings never mix"
    first.report.write_text("{}")
    assert choose_files(None, str(tmp_path), SETTINGS, 0).report.name == "evaluation-dev-2.json"


def test_a_named_file_of_other_settings_is_an_error_that_names_them(tmp_path):
    report = str(tmp_path / "mine.json")
    choose_files(report, str(tmp_path), SETTINGS, 0).append(0, trajectory())
    with pytest.raises(ValueError, match=r"seed was 0 and is 1, temperature was 1\.0 and is 0\.5"):
        choose_files(report, str(tmp_path), SETTINGS | {"seed": 1, "temperature": 0.5}, 0)
    with pytest.raises(ValueError, match="versions was"):
        choose_files(report, str(tmp_path), SETTINGS | {"versions": {"trl": "2"}}, 0)
    assert choose_files(report, str(tmp_path), SETTINGS | {"processes": 2}, 0).outcomes(), "more processes may go on"
    file = tmp_path / "mine.attempts.jsonl"
    file.write_bytes(file.read_bytes()[5:])
    with pytest.raises(ValueError, match=r"first line of .* is damaged"):
        choose_files(report, str(tmp_path), SETTINGS, 0)


def test_standard_errors_are_clustered_by_scenario():
    def attempt(task_id, success, reward):
        return Outcome(
            task_id=task_id, success=success, reward=reward, turns=1, failed_steps=0, docs_steps=0, stop="completed"
        )

    # Both attempts of scenario a succeed, both of b fail: two clusters with sums of +100 and -100 about the mean 50.
    outcomes = [attempt(task, task[0] == "a", float(task[0] == "a")) for task in ("a_1", "a_2", "b_1", "b_2")]
    errors = standard_errors(outcomes)
    assert errors["tgc"] == pytest.approx((2 / 1 * (100**2 + 100**2)) ** 0.5 / 4)
    assert errors["reward"] == pytest.approx((2 * 2) ** 0.5 / 4)
    assert errors["sgc"] == pytest.approx((2 * (50**2 + 50**2)) ** 0.5 / 2)
    assert str(standard_errors(outcomes[:2])["tgc"]) == "nan", "one scenario says nothing about the spread"


@pytest.mark.slow
def test_an_interrupted_evaluation_equals_a_whole_one(tmp_path, pocket_root, appworld_venv, monkeypatch, capsys):
    def evaluate(folder):
        return main(
            [
                *("evaluate", "--config", str(ROOT / "recipes/quickstart/config.yaml")),
                *("--model_name_or_path", str(ROOT / "recipes/quickstart/model"), "--appworld_root", str(pocket_root)),
                *("--appworld_venv", str(appworld_venv), "--output_dir", str(folder), "--max_eval_tasks", "6"),
                *("--eval_samples", "2", "--max_episodes", "4", "--disable_tqdm", "true"),
            ]
        )

    assert evaluate(tmp_path / "whole") == 0
    append, count = EvaluationFiles.append, []

    def interrupt(self, number, trajectory):
        append(self, number, trajectory)
        count.append(number)
        if len(count) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationFiles, "append", interrupt)
        assert evaluate(tmp_path / "parts") == 130
    assert "5 of 12 attempts are kept" in capsys.readouterr().out
    assert not (tmp_path / "parts" / "evaluation-dev.json").exists()
    assert evaluate(tmp_path / "parts") == 0
    assert "going on with 5 of 12 attempts" in capsys.readouterr().out
    whole, parts = (json.loads((tmp_path / name / "evaluation-dev.json").read_text()) for name in ("whole", "parts"))
    assert whole == parts
    assert whole["attempts"] == 12 and whole["standard_errors"]["tgc"] >= 0
    for name in (
        "seed",
        "root",
        "difficulties",
        "prompt",
        "prompt_sha256",
        "max_turns",
        "versions",
        "model",
        "revision",
    ):
        assert name in whole
    order = [
        sorted(attempts_of(tmp_path / name / "evaluation-dev.attempts.jsonl")[1:], key=lambda line: line["attempt"])
        for name in ("whole", "parts")
    ]
    assert order[0] == order[1], "the same attempts"
