"""The code in `docs/` runs, and the figure shows the package's own numbers."""

import re
from pathlib import Path

import pytest

from tests.test_docs import DOCS, script

ROOT = DOCS.parent


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_environment_of_the_page_trains_and_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    space: dict = {"__name__": "page"}
    environment, tasks, training, check = blocks("your_environment.md")
    exec(environment, space)
    exec(tasks, space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gvpo_trl.GVPOConfig", offline(space))
        exec(training, space)
    assert space["trainer"].state.global_step == 1
    exec(check, space)


def offline(space):
    """Return a configuration class that trains on the CPU, whatever the machine has."""
    from gvpo_trl.config import GVPOConfig

    return lambda **options: GVPOConfig(use_cpu=True, disable_tqdm=True, **options)


def test_the_figure_of_the_concepts_shows_the_packages_numbers():
    drawn = script("make_concepts")
    picture = (DOCS / "concepts.svg").read_text(encoding="utf-8")
    shown = re.findall(r">([^<>]*)  →  ([^<>]*)<", picture)
    expected = []
    for position, (_, kind, _, _) in enumerate(drawn.SEGMENTS):
        for outcome, values in map(drawn.advantages, drawn.GROUPS.values()):
            if kind:
                expected.append((drawn.number(outcome), drawn.number(values[position])))
    assert shown == expected
    assert ("0", "−0.2") in shown and ("−0.5", "−0.6") in shown and ("+0.5", "0") in shown
