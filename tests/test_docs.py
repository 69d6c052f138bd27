"""The pages of `docs/`: those that a script makes are current, and every relative link leads somewhere."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def script(name: str) -> ModuleType:
    """Import a script of `docs/`."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_relative_links_lead_to_files_and_headings(page):
    targets = re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = page if not path else (page.parent / path).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in index] == []


def test_the_page_of_all_fields_is_current():
    made = script("make_configuration").page()
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == made, "run python docs/make_configuration.py"


def test_the_page_of_all_fields_is_complete():
    from trl import GRPOConfig, ModelConfig

    from gvpo_trl import GVPOConfig
    from gvpo_trl.cli.arguments import ScriptArguments

    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    names = {field.name for owner in (ScriptArguments, ModelConfig) for field in dataclasses.fields(owner)}
    names |= GVPOConfig.__annotations__.keys() | GRPOConfig.__annotations__.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_field_without_a_description_is_an_error():
    @dataclasses.dataclass
    class Config:
        """A configuration.

        Parameters:
            > Parameters that control the rollout

            seen (`int`, *optional*, defaults to `1`):
                A described field.
        """

        seen: int = 1
        hidden: int = 2

    made = script("make_configuration")
    assert made.described(Config, {"seen"})["Rollout"]["seen"].text == "A described field."
    with pytest.raises(ValueError, match=r"Config: describe each field.*\['hidden'\]"):
        made.described(Config, {"seen", "hidden"})
