"""Verdicts on the tool calls of TRL's own loop, and the trajectories that follow from them.

TRL's loop runs the tools, and turns whatever goes wrong into a message for the model. `ToolWatch` wraps the tools of a
batch, so that each verdict comes from the place where the call ran. A turn is a failed step if one of its calls

    names a tool that does not exist                       FailureKind.UNKNOWN_TOOL
    has arguments that do not parse or do not fit          FailureKind.INVALID_ARGUMENTS
    raises an exception                                    FailureKind.RUNTIME, TIMEOUT or MEMORY
    returns a result that the user's hook calls a failure  the hook's kind

A call that the machinery broke makes the row unscorable instead. A call that TRL did not run, because the trajectory
had used up its iterations, has no verdict.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault
from gvpo_trl.rollout.types import Step, StopReason, Trajectory

ToolVerdict = Callable[[str, dict[str, Any], Any], FailureKind | str | bool | None]
"""A hook that reads a tool's name, arguments and result, and returns a failure kind. `True` stands for `RUNTIME`."""

PROBE = "gvpo_probe"


@dataclass(slots=True)
class _Call:
    """One call that reached a tool."""

    failure: FailureKind | None = None


@dataclass(slots=True)
class _Row:
    """What is known about one row of the batch."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    """TRL's messages after the prompt; the loop appends to this list."""
    names: set[str] = field(default_factory=set)
    calls: dict[int, list[_Call]] = field(default_factory=dict)
    """The calls of each turn that reached a tool, in order."""
    fault: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopResult:
    """What TRL's loop returned, one entry per row."""

    prompt_ids: Sequence[list[int]]
    completion_ids: Sequence[list[int]]
    tool_mask: Sequence[list[int]]
    """1 where the model sampled the token."""
    logprobs: Sequence[list[float]] | None


class ToolWatch:
    """Watches the tools of one batch while TRL's loop runs them.

    Args:
        prompts: (B,) the conversations before the first turn.
        completions: (B,) TRL's lists of messages, each with the first turn, to which the loop appends.
        verdict: the user's hook for tools that report a failure as data.
        faults: exception classes that mean that the machinery broke, besides `EnvironmentFault`.
    """

    def __init__(
        self,
        prompts: Sequence[list[dict[str, Any]]],
        completions: Sequence[list[dict[str, Any]]],
        *,
        verdict: ToolVerdict | None = None,
        faults: tuple[type[Exception], ...] = (),
    ) -> None:
        self.verdict = verdict
        self.faults = (EnvironmentFault, *faults)
        self.rows = [_Row(list(prompt), completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self.broken_hook: tuple[str, Exception] | None = None
        self.trajectories: list[Trajectory] = []
        self.failed_mask: list[list[int]] = []

    def wrap(self, tools: Sequence[Mapping[str, Callable]]) -> list[dict[str, Callable]]:
        """Return the tools of each row, by name, wrapped so that this object sees their calls."""
        wrapped = []
        for row, by_name in zip(self.rows, tools, strict=True):
            row.names |= by_name.keys()
            wrapped.append({name: self._watched(row, name, tool) for name, tool in by_name.items()})
        return wrapped

    def _watched(self, row: _Row, name: str, tool: Callable) -> Callable:
        # TRL calls an asynchronous tool like any other, and awaits what it returns. A wrapper that were asynchronous
        # itself would delay the error of arguments that do not fit, and so change the order of TRL's messages.
        @functools.wraps(tool)
        def watched(**arguments: Any) -> Any:
            call = _Call()
            turn = sum(message["role"] == "assistant" for message in row.completion) - 1
            row.calls.setdefault(turn, []).append(call)
            if not _fits(tool, arguments):
                call.failure = FailureKind.INVALID_ARGUMENTS
            try:
                result = tool(**arguments)
            except BaseException as error:
                self._note(row, call, name, error)
                raise
            if inspect.isawaitable(result):
                return self._awaited(row, call, name, arguments, result)
            self._judge(call, name, arguments, result)
            return result

        return watched

    async def _awaited(self, row: _Row, call: _Call, name: str, arguments: dict[str, Any], pending: Any) -> Any:
        try:
            result = await pending
        except BaseException as error:
            self._note(row, call, name, error)
            raise
        self._judge(call, name, arguments, result)
        return result

    def _note(self, row: _Row, call: _Call, name: str, error: BaseException) -> None:
        if isinstance(error, self.faults):
            row.fault = f"tool {name}: {type(error).__name__}: {error}"
        elif call.failure is None:
            kinds = {TimeoutError: FailureKind.TIMEOUT, MemoryError: FailureKind.MEMORY}
            call.failure = next((kind for each, kind in kinds.items() if isinstance(error, each)), FailureKind.RUNTIME)

    def _judge(self, call: _Call, name: str, arguments: dict[str, Any], result: Any) -> None:
        """Ask the hook. Its exception is kept for `finish`, because TRL would take it for the tool's."""
        if self.verdict is None or call.failure is not None:
            return
        try:
            verdict = self.verdict(name, arguments, result)
            call.failure = FailureKind.RUNTIME if verdict is True else FailureKind(verdict) if verdict else None
        except Exception as error:
            self.broken_hook = self.broken_hook or (name, error)

    def finish(
        self, result: LoopResult, *, tokenizer: Any, end_ids: Sequence[int], task_ids: Sequence[Any], iterations: int
    ) -> None:
        """Make the trajectories and the failed mask (B, T) of what TRL's loop returned.

        Args:
            result: what TRL's loop returned.
            tokenizer: decodes turns.
            end_ids: ids that end a turn.
            task_ids: (B,) the rows' names; `None` for a row without one.
            iterations: how often TRL runs a trajectory's tool calls at most.

        Raises:
            ValueError: `tool_verdict` raised an exception or returned no verdict.
        """
        if self.broken_hook is not None:
            name, error = self.broken_hook
            raise ValueError(
                f"tool_verdict failed for a result of {name!r}: {type(error).__name__}: {error}. It must return None, "
                f"True or one of {', '.join(FailureKind)}."
            ) from error
        marker = call_marker(tokenizer)
        for number, row in enumerate(self.rows):
            ids = result.completion_ids[number]
            steps = self._steps(row, number, result, tokenizer, end_ids, iterations, marker)
            self.trajectories.append(
                Trajectory(
                    task_id=task_ids[number] or _name_of(row.prompt),
                    messages=row.prompt,
                    prompt_ids=result.prompt_ids[number],
                    steps=steps,
                    stop=_stop(row, len(steps), bool(ids) and ids[-1] in end_ids, iterations),
                    score=None,
                    fault=row.fault,
                )
            )
            failed: list[int] = []
            for step in steps:
                failed += [int(step.failure is not None)] * len(step.action_ids) + [0] * len(step.bridge_ids)
            assert len(failed) == len(ids)
            self.failed_mask.append(failed)

    @property
    def unscorable(self) -> list[bool]:
        """(B,) whether the machinery broke in a row."""
        return [row.fault is not None for row in self.rows]

    def rolled_out(self) -> list[dict[str, Any]]:
        """Return (B,) the failed mask and the trajectory of each row, as a rollout adds them to its rows."""
        pairs = zip(self.failed_mask, self.trajectories, strict=True)
        return [{"failed_mask": mask, "trajectory": trajectory} for mask, trajectory in pairs]

    def rewarded(self, rewards: Sequence[float | None]) -> list[Trajectory]:
        """Return the trajectories with their rewards."""
        pairs = zip(self.trajectories, rewards, strict=True)
        return [replace(trajectory, given_reward=reward) for trajectory, reward in pairs]

    def _steps(self, row: _Row, number: int, result, tokenizer, end_ids, iterations: int, marker: str) -> list[Step]:
        """Return the steps of a row: each run of sampled tokens is a turn, and the tokens behind it its bridge."""
        ids, mask = result.completion_ids[number], result.tool_mask[number]
        logprobs = None if result.logprobs is None else result.logprobs[number]
        messages, steps, end = _turns(row.completion), [], 0
        runs = [(sampled, len(list(run))) for sampled, run in groupby(mask)]
        for position, (sampled, length) in enumerate(runs):
            start, end = end, end + length
            if not sampled:
                continue
            bridge = runs[position + 1][1] if position + 1 < len(runs) else 0
            turn = len(steps)
            message, replies = messages[turn] if turn < len(messages) else ({}, [])
            raw = tokenizer.decode(ids[start:end])
            complete = end < len(ids) or ids[end - 1] in end_ids
            steps.append(
                Step(
                    action_ids=ids[start:end],
                    action_logprobs=None if logprobs is None else logprobs[start:end],
                    bridge_ids=ids[end : end + bridge],
                    text=tokenizer.decode(ids[start:end], skip_special_tokens=True),
                    code=None,
                    observation="\n".join(_text(reply["content"]) for reply in replies),
                    failure=self._failure(row, turn, message, raw if complete else "", iterations, marker),
                    api_calls=tuple(_name(call) for call in message.get("tool_calls") or () if turn < iterations),
                )
            )
        return steps

    def _failure(
        self, row: _Row, turn: int, message: dict[str, Any], text: str, iterations: int, marker: str
    ) -> FailureKind | None:
        """Return the kind of the first call of a turn that failed; `None` if every call worked."""
        calls = message.get("tool_calls") or []
        reached = iter(row.calls.get(turn, ()))
        for call in calls if turn < iterations else ():
            function = call.get("function") if call.get("type") == "function" else None
            if function is None or function.get("name") not in row.names:
                return FailureKind.UNKNOWN_TOOL
            if not isinstance(function.get("arguments"), Mapping):
                return FailureKind.INVALID_ARGUMENTS
            record = next(reached, None)
            if record is None:
                return FailureKind.INVALID_ARGUMENTS
            if record.failure is not None:
                return record.failure
        return FailureKind.INVALID_ARGUMENTS if _has_broken_call(text, len(calls), marker) else None


def call_marker(tokenizer: Any) -> str:
    """Return the text with which the tokenizer's template opens a tool call, such as `<tool_call>`.

    It is found by rendering a call of a made-up tool. A call without an opening begins with its JSON, and the text is
    then the JSON's first characters without spaces. It is empty where the template shows no call.
    """
    call = {"type": "function", "function": {"name": PROBE, "arguments": {}}}
    user = {"role": "user", "content": "x"}
    try:
        text = tokenizer.apply_chat_template(
            [user, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False
        )
        plain = tokenizer.apply_chat_template([user, {"role": "assistant", "content": PROBE}], tokenize=False)
    except Exception:
        return ""  # TRL names what is wrong with a template that cannot render tool calls
    if PROBE not in text:
        return ""  # the template renders calls in a way of its own
    before, same = text.partition(PROBE)[0], plain.partition(PROBE)[0]
    differing = (n for n, (a, b) in enumerate(zip(before, same, strict=False)) if a != b)
    opening = before[next(differing, min(len(before), len(same))) :].strip()
    return "".join(opening.split()) if opening.startswith("{") else opening.partition("\n")[0].split(" ")[0]


def _has_broken_call(text: str, parsed: int, marker: str) -> bool:
    """Whether a turn opens more calls than were parsed. TRL takes a call that does not parse for plain text.

    Args:
        text: the whole turn; thoughts in it do not count.
        parsed: number of calls that TRL parsed.
        marker: as `call_marker` returns it.
    """
    answer = text.rpartition("</think>")[2]
    if marker.startswith("{"):
        return parsed == 0 and "".join(answer[:1000].split()).startswith(marker)
    return bool(marker) and answer.count(marker) > parsed


def _fits(tool: Callable, arguments: dict[str, Any]) -> bool:
    """Whether the tool takes arguments of these names."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def _turns(completion: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return each assistant message with the tool messages behind it."""
    turns: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for message in completion:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    return turns


def _stop(row: _Row, turns: int, ended: bool, iterations: int) -> StopReason:
    """Return why a row's loop ended; `ended` says whether its last token ends a turn."""
    if row.fault is not None:
        return StopReason.ENVIRONMENT_LOST
    last = row.completion[-1] if row.completion else {}
    if last.get("tool_calls"):
        return StopReason.MAX_TURNS if turns > iterations else StopReason.MAX_TOKENS
    return StopReason.COMPLETED if ended else StopReason.MAX_TOKENS


def _name(call: Mapping[str, Any]) -> str:
    return str((call.get("function") or call).get("name", "unknown"))


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of blocks."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(block.get("text", f"<{block.get('type')}>")) for block in content)


def _name_of(prompt: Sequence[dict[str, Any]]) -> str:
    """Return a name for a task without one: the same prompt has the same name."""
    return "prompt-" + hashlib.sha256(json.dumps(prompt, default=str).encode()).hexdigest()[:8]
