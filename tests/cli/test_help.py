"""The help of `train` and `evaluate` has groups, ours first; and a system without Linux is told so in one line."""

import sys

import pytest

from gvpo_trl.cli.config import build_parser
from gvpo_trl.cli.doctor import examine
from gvpo_trl.cli.main import main
from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.faults import SetupError


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_has_groups_with_ours_first_and_examples_at_the_end(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    order = [
        *(
            "--config FILE",
            "--appworld_root",
            "--failure_penalty",
            "--num_generations",
            "--lora_r",
            "--steps_per_generation",
        ),
        *("--weight_decay", "examples:"),
    ]
    positions = [shown.index(each) for each in order]
    assert positions == sorted(positions)
    assert shown.rstrip().splitlines()[-1].startswith(("  gvpo-trl", "An interrupted"))


def test_help_leaves_no_field_out():
    parser = build_parser("train")
    shown = parser.format_help()
    assert [a.dest for a in parser._actions if a.option_strings and a.option_strings[0] not in shown] == []


def test_other_systems_are_told_that_the_environment_needs_linux(monkeypatch, pocket_root, appworld_venv, capsys):
    with AppWorldEnvironments(pocket_root, venv=appworld_venv) as environments:
        monkeypatch.setattr(sys, "platform", "darwin")
        for call in (environments.start, lambda: environments.open("any")):
            with pytest.raises(
                SetupError, match="restricted by Linux, and this is darwin: use Linux, a container or WSL 2"
            ):
                call()
        (finding,) = [finding for finding in examine() if finding.name == "system"]
        assert finding.blocks and "needs Linux" in finding.remedy
        assert main(["appworld", "setup"]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "Linux" in error
