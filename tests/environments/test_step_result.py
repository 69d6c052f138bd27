"""What the trainer's side makes of the line that an interpreter reports, which the agent controls."""

import pytest

from gvpo_trl.environments.appworld.episodes import step_result


@pytest.mark.parametrize(
    ("verdict", "line", "taken"),
    [
        ("runtime", 3, 3),
        ("runtime", None, None),
        ("runtime", True, None),
        ("runtime", "3", None),
        ("runtime", 3.0, None),
        ("runtime", [3], None),
        (None, 3, None),
    ],
)
def test_only_a_whole_number_of_a_failed_step_is_a_line(verdict, line, taken):
    assert step_result({"text": "", "verdict": verdict, "failed_line": line}, 100).failed_line == taken
