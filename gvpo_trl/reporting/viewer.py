"""Shows a run's trajectories as plain text for `gvpo-trl view RUN`, so that `less` and `grep` can work on them.

Characters that a terminal would obey are escaped (`text.py`), and the work is linear in the length of the texts.
"""

import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gvpo_trl.reporting.traces import read_traces
from gvpo_trl.text import printable, printable_line

WIDTH = 100
"""Columns of the rules between messages and of test requirements; code and observations are not wrapped."""


@dataclass(kw_only=True, slots=True)
class Summary:
    """Figures of the trajectories that were sampled at one training step, in one mode."""

    mode: str
    step: int
    rewards: list[float] = field(default_factory=list)
    trajectories: int = 0
    solved: int = 0
    turns: int = 0
    failed_turns: int = 0

    def add(self, trace: dict[str, Any]) -> None:
        """Add one trajectory to the figures."""
        self.trajectories += 1
        self.turns += len(trace["steps"])
        self.failed_turns += sum(step["failure"] is not None for step in trace["steps"])
        if trace["reward"] is not None:
            self.rewards.append(trace["reward"])
            self.solved += bool(trace["passed"]) and not trace["failed"]

    def __str__(self) -> str:
        reward = f"{sum(self.rewards) / len(self.rewards):.3f}" if self.rewards else "-"
        solved = f"{self.solved}/{len(self.rewards)}"
        failed = f"{self.failed_turns / self.turns:.2f}" if self.turns else "-"
        turns = f"{self.turns / self.trajectories:.1f}"
        return f"{self.mode:6}{self.step:6}{self.trajectories:8}{reward:>9}{solved:>10}{failed:>14}{turns:>8}"


HEADER = f"{'mode':6}{'step':>6}{'trajs':>8}{'reward':>9}{'solved':>10}{'failed steps':>14}{'turns':>8}"


def view(
    run: Path | str,
    *,
    task_id: str | None = None,
    step: int | None = None,
    mode: str | None = None,
    failed: bool = False,
    last: int = 1,
) -> Iterator[str]:
    """Yield a table of the run, with a line per step and mode, and then the last trajectories in full.

    The filters apply to the table and to the trajectories. Traces that lack a field are left out. No line contains a
    character that is not printable, except newlines and tabs.

    Args:
        run: `output_dir` of a run.
        task_id: show only attempts at this task.
        step: show only what was sampled at this training step.
        mode: show only `"train"` or `"eval"`.
        failed: show only trajectories with a failed step.
        last: number of trajectories to show in full.

    Raises:
        FileNotFoundError: the run holds no trajectories.
        ValueError: no trajectory passes the filters.
    """
    summaries: dict[tuple[str, int], Summary] = {}
    shown: deque[dict[str, Any]] = deque(maxlen=last)
    for trace in read_traces(Path(run)):
        if not _is_complete(trace):
            continue
        key = (trace["mode"], trace["step"])
        wanted = (
            task_id in (None, trace["task_id"]) and step in (None, trace["step"]) and mode in (None, trace["mode"])
        )
        if not wanted or (failed and not any(turn["failure"] for turn in trace["steps"])):
            continue
        summaries.setdefault(key, Summary(mode=key[0], step=key[1])).add(trace)
        shown.append(trace)
    if not summaries:
        raise ValueError(f"{run} holds no trajectory that matches; leave a filter out")
    yield HEADER
    for summary in sorted(summaries.values(), key=lambda each: (each.mode, each.step)):
        yield printable_line(str(summary))
    for trace in shown:
        yield ""
        yield from render(trace)


def render(trace: dict[str, Any]) -> Iterable[str]:
    """Yield the lines of one trajectory: its prompt, each turn with verdict and observation, and the unit tests."""
    reward = "unscorable" if trace["reward"] is None else f"reward {trace['reward']:.3f}"
    title = f"{trace['task_id']}  {trace['mode']} step {trace['step']}  {reward}  stopped: {trace['stop']}"
    yield printable_line(title)
    yield "=" * WIDTH
    for message in trace["messages"]:
        yield _rule(message["role"])
        yield printable(str(message["content"]))
    for number, turn in enumerate(trace["steps"], start=1):
        verdict = f"FAILED: {turn['failure']}" if turn["failure"] else "executed"
        if errors := turn.get("api_errors"):  # traces of earlier versions lack them
            verdict += f", {len(errors)} API error{'s' * (len(errors) > 1)}: {', '.join(map(str, errors[:5]))}"
        yield _rule(f"turn {number}, {turn['tokens']} tokens, {verdict}")
        yield printable(turn["text"])
        yield _rule("observation")
        yield printable(turn["observation"])
    yield _rule("unit tests")
    for mark, name in (("pass", "passed"), ("FAIL", "failed")):
        for requirement in trace[name] or ():
            yield _WRAP.fill(f"{mark}  {printable_line(str(requirement))}")
    if trace["fault"]:
        yield f"fault of the machinery: {printable_line(trace['fault'])}"


_WRAP = textwrap.TextWrapper(WIDTH, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
"""Wraps test requirements at spaces only: to break a long word, textwrap copies the rest of it for every line."""


def _rule(title: str) -> str:
    return f"-- {printable_line(title)} ".ljust(WIDTH, "-")


_FIELDS = {
    **dict.fromkeys(("task_id", "mode", "stop"), str),
    "step": int,
    "reward": int | float | None,
    "fault": str | None,
    **dict.fromkeys(("messages", "steps"), list),
    **dict.fromkeys(("passed", "failed"), list | None),
}
_ITEMS = {
    "messages": {"role": str, "content": object},
    "steps": {"text": str, "observation": str, "failure": str | None, "tokens": int},
}
"""Fields that the viewer reads of a trace and of its messages and steps, as `traces.to_json` writes them."""


def _is_complete(trace: dict[str, Any]) -> bool:
    """Whether a trace has every field that the viewer reads: another program may have written the line."""
    return _has(trace, _FIELDS) and all(_has(item, fields) for name, fields in _ITEMS.items() for item in trace[name])


def _has(value: Any, fields: dict[str, Any]) -> bool:
    return isinstance(value, dict) and all(
        name in value and isinstance(value[name], kind) for name, kind in fields.items()
    )
