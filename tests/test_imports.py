"""The import rules of the package: which module may import which, checked against the source of every module.

A rule belongs to a folder and holds for every module in it, so a new file cannot be forgotten. `RULES` names each
folder and each module beside the folders, and a test finds a module that no rule covers. Whoever changes the direction
of an import changes this table.
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
LAZY = {"vllm", "matplotlib", "datasets", "pandas"}
"""Libraries that every module imports only inside the functions that use them."""
APPWORLD = {"appworld", "freezegun", "IPython", "sqlmodel", "sqlalchemy", "fastapi", "starlette", "libcst"} | {
    "pydantic",
    "fastapi_login",
    "traitlets",
    "pendulum",
    "anyio",
    "pytest",
    "orjson",
}
"""AppWorld and the libraries of its virtual environment."""
CORE = ("failures", "faults", "text")
HELPERS = ("environments.appworld.tasks", "environments.appworld.limits")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the modules of a folder may import in addition to the standard library and their own folder."""

    ours: tuple[str, ...] = ()
    """Modules and folders of this package, without the prefix `gvpo_trl.`."""
    libraries: frozenset[str] = frozenset()


def rule(*ours: str, libraries: set[str] = frozenset()) -> Rule:
    return Rule(ours=ours, libraries=frozenset(libraries))


MODEL = {"torch", "transformers", "accelerate"}
RULES = {
    # These modules hold the method and the two kinds of failure.
    "objective": rule(libraries={"torch"}),
    "failures": rule(),
    "step_advantages": rule("objective", "failures", libraries={"torch"}),
    "text": rule(),
    "faults": rule("text"),
    "rewards": rule("environments.base"),
    # The rollout and the environments import no library.
    "rollout": rule(*CORE, "environments.base", "environments.interface"),
    "environments": rule(*CORE),
    "environments.appworld": rule(
        *CORE,
        *("environments.base", "environments.appworld.wire", "environments.appworld.http"),
        *("environments.appworld.engine", "pocket.generator"),  # only for the names of the programs that it starts
        libraries={"datasets"},
    ),
    "environments.appworld.http": rule(*CORE, "environments.base", "environments.appworld.wire", *HELPERS),
    "environments.sql": rule(*CORE, "environments.base", "sandbox", libraries={"datasets"}),
    "sandbox": rule(),
    # AppWorld's own Python runs these folders; the trainer's process runs some of them as well.
    "environments.appworld.wire": rule("text"),
    "environments.appworld.engine": rule("environments.appworld.wire", "sandbox", libraries=APPWORLD),
    "pocket": rule(libraries=APPWORLD),
    # These modules import the libraries of models and figures, and the last two of them TRL.
    "generation": rule(*CORE, "rollout", libraries={*MODEL, "vllm"}),
    "training": rule(
        *(*CORE, "objective", "step_advantages", "rollout", "environments.interface"), libraries={*MODEL, "numpy"}
    ),
    "reporting": rule(
        *(*CORE, "rollout", "environments.base", "environments.appworld.tasks"),
        libraries={"matplotlib", "jinja2", "yaml", "huggingface_hub", "transformers", "accelerate", "tqdm"},
    ),
    "config": rule("failures", "objective", "step_advantages", libraries={"trl"}),
    "multi_turn": rule("rollout", "generation", "training", "reporting", libraries={*MODEL, "trl"}),
    "trainer": rule(
        *("multi_turn", "config", "step_advantages", "rewards", "text", "rollout"),
        *("generation", "training", "reporting"),
        libraries={*MODEL, "trl"},
    ),
    # The outermost modules may import those above, and no module above imports them.
    "evaluation": rule("trainer", "rollout", "training", libraries={"accelerate"}),
    "cli": rule(
        *(*CORE, "config", "trainer", "training", "evaluation", "reporting", "rollout", "environments", "sandbox"),
        "__init__",
        libraries={*MODEL, "trl", "peft", "datasets", "yaml", "packaging", "tqdm"},
    ),
    "__init__": rule("config", "trainer", "rollout"),
    "__main__": rule("cli"),
}


@dataclass(frozen=True)
class Import:
    """The target of an import statement."""

    name: str
    """Absolute dotted name."""
    lazy: bool
    """Whether the statement is inside a function, or for the type checker only."""
    typing: bool
    """Whether the statement is for the type checker only."""
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
        if base.partition(".")[0] == "gvpo_trl":
            yield from (
                Import(resolve(f"{base}.{alias.name}"), lazy or typing, typing, node.lineno) for alias in node.names
            )
        else:
            yield Import(base, lazy or typing, typing, node.lineno)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, lazy=lazy or inside, typing=typing or checking)


def resolve(name: str) -> str:
    """Return the module that an imported name belongs to: the name itself, or the module that defines it."""
    path = PACKAGE.parent / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


def rule_of(name: str) -> str | None:
    """Return the key of the most specific rule for a module of this package, given by its full name."""
    inside = name.removeprefix("gvpo_trl").removeprefix(".") or "__init__"
    while inside and inside not in RULES:
        inside = inside.rpartition(".")[0]
    return inside or None


MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [module_name(path) for path in MODULES]


def violations(path: Path) -> list[str]:
    """Return a readable line for each import of a module that its rule forbids."""
    found = []
    key = rule_of(module_name(path))
    if key is None:
        return [f"{path.relative_to(ROOT)} belongs to no rule; add its folder to RULES"]
    for imported in read_imports(path):
        reason = reason_against(key, imported)
        if reason:
            found.append(f"{path.relative_to(ROOT)}:{imported.line} imports {imported.name}: {reason}")
    return found


def reason_against(key: str, imported: Import) -> str | None:
    allowed = RULES[key]
    if imported.top == "gvpo_trl":
        target = imported.name.removeprefix("gvpo_trl").removeprefix(".") or "__init__"
        if rule_of(imported.name) == key or any(f"{target}.".startswith(f"{ours}.") for ours in allowed.ours):
            return None
        return f"{key} may import of this package: {', '.join(allowed.ours) or 'nothing'}"
    if imported.top in sys.stdlib_module_names or imported.typing:
        return None
    if imported.top not in allowed.libraries:
        return f"{key} may import beside the standard library: {', '.join(sorted(allowed.libraries)) or 'nothing'}"
    return "import it inside the function that uses it" if imported.top in LAZY and not imported.lazy else None


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_arrows(path):
    assert violations(path) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("objective", "import numpy", "standard library: torch"),
        ("rollout/loop", "import torch", "standard library: nothing"),
        ("rollout/loop", "from gvpo_trl.trainer import GVPOTrainer", "rollout may import of this package"),
        ("rollout/a_new_file", "def f():\n    from trl import GRPOTrainer", "standard library: nothing"),
        ("reporting/plots", "import matplotlib.pyplot as plt", "inside the function"),
        ("generation/vllm", "import vllm", "inside the function"),
        ("evaluation", "from trl import GRPOTrainer", "standard library: accelerate"),
        ("text", "from gvpo_trl.faults import SetupError", "may import of this package: nothing"),
        ("environments/appworld/client", "def f():\n    import appworld", "standard library: datasets"),
        ("environments/appworld/engine/worlds/host", "from gvpo_trl.failures import FailureKind", "wire, sandbox"),
        ("environments/appworld/engine/a_new_file", "import torch", "IPython, anyio, appworld"),
        ("environments/appworld/tasks", "import datasets", "inside the function"),
        (
            "environments/sql/client",
            "from gvpo_trl.environments.appworld.tasks import load_tasks",
            "environments.sql may",
        ),
        ("a_new_folder/module", "import json", "add its folder to RULES"),
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


def arrows() -> dict[str, set[str]]:
    """Map each module to the modules of this package that it imports, at its top or inside a function."""
    return {
        module_name(path): {imported.name for imported in read_imports(path) if imported.top == "gvpo_trl"}
        for path in MODULES
    }


def test_there_is_no_circle():
    graph = arrows()
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}, "these modules import each other in a circle"


def test_every_module_is_tied_to_the_others():
    graph = arrows()
    ties = {name: set(targets) for name, targets in graph.items()}
    for name, targets in graph.items():
        for target in targets:
            ties[target].add(name)
    reached, waiting = set(), ["gvpo_trl.trainer"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += ties[name]
    folders = {module_name(path) for path in MODULES if path.name == "__init__.py" and not graph[module_name(path)]}
    assert graph.keys() - reached - folders == set()


def test_every_folder_says_who_runs_it():
    for path in MODULES:
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            assert len(text.splitlines()) >= 3, f"{path.relative_to(ROOT)}: say who runs this folder, what it imports"


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


@pytest.mark.parametrize(
    "statement", ["import gvpo_trl", "import gvpo_trl.cli.main, gvpo_trl.cli.doctor, gvpo_trl.cli.arguments"]
)
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
