"""`gvpo-trl doctor` lists what is installed, and what to type for what is missing.

It reads versions from package metadata and imports none of the packages, so it answers at once, even where an import
would fail. This module needs the standard library only.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from gvpo_trl import __version__

DISTRIBUTION = "gvpo-trl"
DATA_ROOTS = (Path("."), Path("data/pocket"))
"""Data roots that are examined in addition to `APPWORLD_ROOT`."""
VLLM = "vllm>=0.22,<=0.31.0"
"""The requirement of the extra `vllm` in `setup.cfg`."""

_TORCH_PROBE = """
from torch import accelerator as a
print(a.is_available() and f"{a.device_count()} x {a.current_accelerator()}")
"""


class State(StrEnum):
    """Whether a finding needs the user's attention."""

    OK = "ok"
    ABSENT = "--"
    """Something optional is not there."""
    MISSING = "!!"
    """Something required is missing or has the wrong version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of the table."""

    section: str
    name: str
    found: str
    state: State = State.OK
    remedy: str | None = None
    """The command to type, or the change to make."""

    @property
    def blocks(self) -> bool:
        """Whether training is impossible until the user mends this."""
        return self.state is State.MISSING


def examine() -> list[Finding]:
    """Examine the packages, the accelerator, AppWorld, the sandbox and the data. Whatever is missing is a finding."""
    return [
        Finding(section="system", name="gvpo-trl", found=__version__),
        Finding(section="system", name="python", found=f"{platform.python_version()} ({sys.executable})"),
        _system(),
        *_packages(),
        _accelerator(),
        _vllm(),
        _appworld(),
        _sandbox(),
        *_data_roots(),
    ]


def render(findings: list[Finding]) -> str:
    """Format the findings as a plain text table, followed by what to type for what is missing."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {finding.state:2}  {finding.name:{width}}  {finding.found}")
    for title, state in (("missing, required", State.MISSING), ("not there, optional", State.ABSENT)):
        remedies = [finding for finding in findings if finding.state is state and finding.remedy]
        if remedies:
            lines += ["", f"{title}; what to type:"]
            lines += [f"  {finding.name:{width}}  {finding.remedy}" for finding in remedies]
    blocked = any(finding.blocks for finding in findings)
    lines += ["", "not ready to train yet" if blocked else "ready to train"]
    return "\n".join(lines)


def _system() -> Finding:
    """Say whether AppWorld's worlds can run on this system, which takes Linux."""
    found = f"{platform.system()} {platform.release()}"
    if sys.platform.startswith("linux"):
        return Finding(section="system", name="system", found=found)
    remedy = "the environment needs Linux: use Linux, a container or WSL 2"
    return Finding(section="system", name="system", found=found, state=State.MISSING, remedy=remedy)


def _packages() -> Iterator[Finding]:
    """Yield one finding for each package that training needs, compared with the range in this package's metadata."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding(
            section="packages",
            name=DISTRIBUTION,
            found="not installed; this is a source checkout",
            state=State.MISSING,
            remedy="pip install -e .",
        )
        return
    for text in requirements:
        requirement, _, marker = text.partition(";")
        if "extra" not in marker:
            yield _package(requirement.strip())


def _package(requirement: str) -> Finding:
    name = requirement
    for sign in "<>=!~ ":
        name = name.partition(sign)[0]
    wanted = requirement.removeprefix(name)
    remedy = f'pip install "{requirement}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(section="packages", name=name, found="not installed", state=State.MISSING, remedy=remedy)
    if wanted and not _satisfies(version, wanted):
        found = f"{version}, but {wanted} is needed"
        return Finding(section="packages", name=name, found=found, state=State.MISSING, remedy=remedy)
    return Finding(section="packages", name=name, found=version)


def _satisfies(version: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # `packaging` has a row of its own, which says that it is missing
        return True
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _accelerator() -> Finding:
    """Find the accelerator as PyTorch sees it.

    PyTorch takes seconds to import, so it is asked only if the machine shows an accelerator, and in another process.
    """
    section = "accelerator"
    listing = _output(["nvidia-smi", "-L"])
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    if not listing and not Path("/dev/kfd").exists() and not apple:
        found = f"none; {os.cpu_count()} CPU cores (enough for the quickstart)"
        return Finding(section=section, name="device", found=found, state=State.ABSENT)
    answer = _output([sys.executable, "-c", _TORCH_PROBE], timeout_s=60)
    if answer and answer != "False":
        names = {line.partition(": ")[2].partition(" (")[0] for line in listing.splitlines()}
        found = " ".join([answer, *sorted(names)])
        return Finding(section=section, name="device", found=found)
    return Finding(
        section=section,
        name="device",
        found="the machine has one, but this build of PyTorch does not see it",
        state=State.ABSENT,
        remedy='pip install --force-reinstall "torch>=2.13,<3", a build for your accelerator',
    )


def _vllm() -> Finding:
    try:
        return Finding(section="accelerator", name="vllm", found=metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        return Finding(
            section="accelerator",
            name="vllm",
            found="not installed; generation goes through transformers",
            state=State.ABSENT,
            remedy=f'pip install "{VLLM}"   (with a CUDA GPU; then use_vllm: true)',
        )


def _appworld() -> Finding:
    from gvpo_trl.environments.appworld.setup import check_installation, default_venv

    section, name = "appworld", "environment"
    remedy = "gvpo-trl appworld setup"
    venv = default_venv()
    if not venv.exists():
        return Finding(section=section, name=name, found=f"no {venv}", state=State.MISSING, remedy=remedy)
    try:
        check_installation(venv)
    except ValueError as error:
        found = str(error).splitlines()[0]
        return Finding(section=section, name=name, found=found, state=State.MISSING, remedy=remedy)
    return Finding(section=section, name=name, found=str(venv))


def _sandbox() -> Finding:
    """Find how well this kernel can keep agent code away from the answers and from this machine."""
    from gvpo_trl.sandbox.restriction import probe

    support = probe()
    found = f"{support.level} ({', '.join(support.layers)})"
    return Finding(
        section="appworld",
        name="sandbox",
        found=f"{found}; agent code is not shut in" if support.missing else found,
        state=State.ABSENT if support.missing else State.OK,
        remedy="; ".join(support.missing) or None,
    )


def _data_roots() -> Iterator[Finding]:
    """Yield a finding for each data root that is found, and one that blocks if there is none."""
    candidates = [(f"{root}/data", root) for root in DATA_ROOTS]
    if root := os.environ.get("APPWORLD_ROOT"):
        candidates.insert(0, ("APPWORLD_ROOT", Path(root)))
    tasks = {name: _count_tasks(root) for name, root in candidates}
    any_root = any(tasks.values())
    for name, root in candidates:
        if tasks[name]:
            splits = ", ".join(f"{split} {count}" for split, count in tasks[name].items())
            yield Finding(section="appworld", name=name, found=f"{root.resolve()}: tasks in {splits}")
        elif name == "APPWORLD_ROOT":
            yield Finding(
                section="appworld",
                name=name,
                found=f"{root} holds no data/datasets",
                state=State.ABSENT,
                remedy="export APPWORLD_ROOT=DIR, the folder that holds data/",
            )
    if not any_root:
        yield Finding(
            section="appworld",
            name="data root",
            found="none found (APPWORLD_ROOT, ., data/pocket)",
            state=State.MISSING,
            remedy="gvpo-trl appworld pocket --root data/pocket",
        )


def _count_tasks(root: Path) -> dict[str, int]:
    """Count the tasks of each split of a folder; the result is empty if the folder is not a data root."""
    counts = {}
    for split in ("train", "dev", "test_normal", "test_challenge"):
        try:
            text = (root / "data" / "datasets" / f"{split}.txt").read_text(encoding="utf-8")
        except OSError:
            continue
        counts[split] = len(text.split())
    return counts


def _output(command: list[str], timeout_s: float = 15) -> str:
    """Return the standard output of a command, or nothing if the command does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
