"""`gvpo-trl recipe` writes a recipe and never writes over one unasked; a missing package is one line."""

from pathlib import Path

import pytest

from gvpo_trl.cli.main import main
from tests.support.training import make_trainer

ROOT = Path(__file__).resolve().parents[2]


def test_a_recipe_is_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "quickstart"]) == 0
    config = tmp_path / "recipes" / "quickstart" / "config.yaml"
    assert config.read_text() == (ROOT / "recipes/quickstart/config.yaml").read_text()
    config.write_text("mine")
    assert main(["recipe", "quickstart"]) == 2
    assert "exists; move it away, or write over it with --overwrite" in capsys.readouterr().err
    assert config.read_text() == "mine"
    assert main(["recipe", "quickstart", "--overwrite"]) == 0
    assert config.read_text() != "mine"


def test_an_unknown_recipe_names_the_known_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "nothing"]) == 2
    assert "choose one of" in capsys.readouterr().err
    assert main(["recipe"]) == 0
    assert "quickstart" in capsys.readouterr().out.split()


def test_vllm_is_asked_for_by_the_name_of_its_extra(tmp_path):
    with pytest.raises(ValueError, match=r'use_vllm=True needs vLLM: pip install "gvpo-trl\[vllm\]"'):
        make_trainer(tmp_path, [["x"]], use_vllm=True)
