"""Every notebook runs from top to bottom, shortened by its settings; its committed outputs come from a real run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def _code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, pocket_root, tmp_path, monkeypatch):
    monkeypatch.setenv("GVPO_POCKET", str(pocket_root))
    monkeypatch.setenv("GVPO_NOTEBOOK_OUTPUT", str(tmp_path))
    monkeypatch.setenv("GVPO_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("GVPO_NOTEBOOK_TASKS", "3")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the plot is missing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_the_outputs_of_a_real_run(path):
    cells = _code(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert str(Path.home()) not in path.read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "lora_variants"}
