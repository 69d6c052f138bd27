"""What is built is what a user needs: the wheel runs in an environment of its own, and the sdist holds the tests."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def run(*command, cwd=ROOT):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the wheel and the sdist, built from a copy of the files that git would give to a clone."""
    folder = tmp_path_factory.mktemp("package")
    source, output = folder / "source", folder / "dist"
    source.mkdir()
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked source distribution has no list of its files")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source)
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    return wheel, sdist


def test_the_descriptions_are_in_order(built):
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", *built)


def test_the_wheel_holds_what_the_code_reads(built):
    names = zipfile.ZipFile(built[0]).namelist()
    for name in (
        "gvpo_trl/py.typed",
        "gvpo_trl/environments/appworld/prompts/compact.txt",
        "gvpo_trl/reporting/templates/model_card.md",
        "gvpo_trl/recipes/quickstart/config.yaml",
        "gvpo_trl/recipes/quickstart/model/model.safetensors",
        "gvpo_trl/recipes/qwen2.5-7b-lora/config.yaml",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/")) or "__pycache__" in name]


def test_the_source_distribution_holds_the_tests_and_what_they_need(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("tests/conftest.py", "tests/support/tiny.py", "Makefile", "benchmarks/common.py", "ruff.toml"):
        assert name in names
    assert {"docs/README.md", "recipes/quickstart/config.yaml", "notebooks/quickstart.ipynb", ".ci/run"} <= names


def test_an_installed_package_runs_the_commands(built, tmp_path):
    """The environment is empty but for the dependencies, which it borrows from the environment of the tests."""
    home, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", packages, built[0])
    python = home / "bin" / "python"
    where = run(python, "-c", "import gvpo_trl; print(gvpo_trl.__file__)", cwd=work)
    assert where.strip().startswith(str(home))
    command = (python, "-m", "gvpo_trl")
    assert "recipe" in run(*command, "--help", cwd=work)
    assert "quickstart" in run(*command, "recipe", cwd=work).splitlines()
    run(*command, "recipe", "quickstart", cwd=work)
    assert (work / "recipes/quickstart/model/model.safetensors").is_file()
    code = "from gvpo_trl.cli.config import parse_config; "
    code += "print(parse_config('train', ['--config', 'recipes/quickstart/config.yaml'])[2].model_name_or_path)"
    assert run(python, "-c", code, cwd=work).strip().endswith("recipes/quickstart/model")
