"""The import arrows of the package: who may import whom, read from every module's source.

The tables below are the design in force: a change of the arrows is a change of theirs.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gvpo_trl"
APPWORLD = "gvpo_trl.environments.appworld"

TRL_ALLOWED = ("gvpo_trl.config", "gvpo_trl.trainer", "gvpo_trl.cli*")
"""The only modules that know TRL."""

INNER = (
    "gvpo_trl.failures",
    "gvpo_trl.environments*",
    "gvpo_trl.rollout.types",
    "gvpo_trl.rollout.chat",
    "gvpo_trl.rollout.clock",
    "gvpo_trl.rollout.packing",
    "gvpo_trl.rollout.loop",
)
"""The circle that knows no library: its modules import the standard library and each other."""

HOST_SIDE = (
    "host*",
    "evaluator*",
    "agent*",
    "pocket*",
    "forkserver",
    "sandbox",
    "verdicts",
    "interpreter",
    "wire",
    "calls",
    "world*",
)
"""Modules that run in AppWorld's environment, by their stem: they never import this package."""

HOST_LIBRARIES = {"appworld", "freezegun", "IPython", "sqlmodel", "sqlalchemy", "fastapi", "starlette", "libcst"} | {
    "pydantic",
    "traitlets",
    "pendulum",
    "anyio",
    "pytest",
    "orjson",
}
"""AppWorld and what it brings along."""

LAZY = {"vllm", "matplotlib", "seaborn", "plotly", "datasets", "pandas"}
"""Imported inside the functions that use them, in every module."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    name: str
    """Absolute dotted name."""
    lazy: bool
    """Inside a function, or for the type checker only."""
    typing: bool
    line: int

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(path: Path) -> list[Import]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), package, lazy=False, typing=False))


def _walk(node: ast.AST, package: str, *, lazy: bool, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, lazy or typing, typing, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parent, *([base] if base else [])])
        if base == "gvpo_trl" or (PACKAGE.parent / base.replace(".", "/")).is_dir():
            yield from (Import(f"{base}.{alias.name}", lazy or typing, typing, node.lineno) for alias in node.names)
        else:
            yield Import(base, lazy or typing, typing, node.lineno)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, lazy=lazy or inside, typing=typing or checking)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    for pattern in patterns:
        if pattern.endswith("*"):
            if name.startswith(pattern[:-1]) or name == pattern.removesuffix(".*"):
                return True
        elif name == pattern:
            return True
    return False


def is_host_side(path: Path) -> bool:
    return path.parent == PACKAGE / "environments/appworld" and matches(path.stem, HOST_SIDE)


MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [module_name(path) for path in MODULES]


def violations(path: Path) -> list[str]:
    """Every import of a module that the table forbids, as readable lines."""
    name = module_name(path)
    siblings = {sibling.stem for sibling in path.parent.glob("*.py")} if is_host_side(path) else set()
    found = []
    for imported in read_imports(path):
        reason = None
        if is_host_side(path):
            reason = host_side_reason(imported, siblings)
        elif imported.top == "appworld":
            reason = "appworld is imported in its own processes only"
        elif imported.top == "trl" and not matches(name, TRL_ALLOWED):
            reason = f"trl is for {', '.join(TRL_ALLOWED)}"
        elif imported.top in LAZY and not imported.lazy:
            reason = "import it inside the function that uses it"
        else:
            reason = inner_reason(name, imported)
        if reason:
            found.append(f"{path.relative_to(ROOT)}:{imported.line} imports {imported.name}: {reason}")
    return found


def host_side_reason(imported: Import, siblings: set[str]) -> str | None:
    if imported.top == "gvpo_trl":
        return "it runs in AppWorld's environment, where this package is not installed"
    if imported.top in sys.stdlib_module_names or imported.top in siblings or imported.top in HOST_LIBRARIES:
        return None
    return "only the standard library and what AppWorld brings"


def inner_reason(name: str, imported: Import) -> str | None:
    """Rules of the modules that know few libraries or none."""
    if imported.top in sys.stdlib_module_names or imported.typing:
        return None
    if name == "gvpo_trl.objective":
        return None if imported.top == "torch" else "the objective imports torch alone"
    if name == f"{APPWORLD}.tasks" and imported.top == "datasets" and imported.lazy:
        return None
    inner = [pattern.removesuffix("*") for pattern in INNER]
    if not matches(name, INNER) or any(f"{imported.name}.".startswith(f"{module}.") for module in inner):
        return None
    return "it may import the standard library and " + ", ".join(inner)


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_arrows(path):
    assert violations(path) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("objective", "import numpy", "torch alone"),
        ("rollout/loop", "import torch", "standard library"),
        ("rollout/loop", "from gvpo_trl.trainer import GVPOTrainer", "standard library"),
        ("rollout/callback", "def f():\n    from trl import GRPOTrainer", "trl is for"),
        ("plots", "import matplotlib.pyplot as plt", "inside the function"),
        ("environments/appworld/client", "def f():\n    import appworld", "its own processes"),
        ("environments/appworld/host", "from ...failures import FailureKind", "not installed"),
        ("environments/appworld/host", "import torch", "what AppWorld brings"),
        ("environments/appworld/tasks", "import datasets", "inside the function"),
    ],
)
def test_a_forbidden_import_is_found(module, source, reason, tmp_path, monkeypatch):
    copy = tmp_path / "gvpo_trl" / f"{module}.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "gvpo_trl")
    assert len(violations(copy)) == 1
    assert reason in violations(copy)[0]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORTED = """
import sys
before = set(sys.modules)
{statement}
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""


@pytest.mark.parametrize("statement", ["import gvpo_trl", "import gvpo_trl.cli, gvpo_trl.doctor, gvpo_trl.script"])
def test_importing_the_package_loads_the_standard_library_alone(statement):
    loaded = set(run_python(IMPORTED.format(statement=statement)).split())
    assert loaded - set(sys.stdlib_module_names) == {"gvpo_trl"}


def test_public_names_load_from_the_package():
    classes = "g.GVPOConfig, g.GVPOTrainer, g.MultiTurnRollout"
    code = f"import gvpo_trl as g; print(*[c.__name__ for c in ({classes})], *dir(g))"
    names = run_python(code).splitlines()[-1].split()
    assert names[:3] == ["GVPOConfig", "GVPOTrainer", "MultiTurnRollout"]
    assert set(names[:3]) <= set(names[3:])


def test_an_unknown_name_is_an_attribute_error():
    import gvpo_trl

    with pytest.raises(AttributeError, match="GVPOTrianer"):
        gvpo_trl.GVPOTrianer  # noqa: B018
