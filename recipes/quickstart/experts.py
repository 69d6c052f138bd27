"""Scripted experts with sloppy habits: they know the solution of every task, and still mistype, skip and forget."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from gvpo_trl.pocket.families import Family, Values
from gvpo_trl.rollout.types import Turn, TurnRequest

GIVE_UP = "apis.supervisor.complete_task()"
"""What an expert types whose last turn failed after all, as when a slip before it had done half of the work."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities that make an expert sloppy; the defaults give a start that GVPO can improve."""

    slip: float = 0.36
    """A turn is first written in a way that fails."""
    slip_again: float = 0.2
    """After a slip, another one before the turn is right."""
    skip_docs: float = 0.5
    """A lookup of the docs is left out."""
    slip_unread: float = 0.65
    """As `slip`, for the turn that needed the docs, when they were not read."""
    wrong_end: float = 0.3
    """The last turn misses something, and completes the task."""
    wrong_end_unread: float = 0.55
    """As `wrong_end`, when the docs were not read."""
    careful: tuple[str, ...] = ("note_create", "song_keep", "song_answer", "text_person")
    """Families whose experts mistype as often but hardly ever end wrongly, so that a group's rewards tie."""
    wrong_end_careful: float = 0.03


def script(family: Family, values: Values, habits: Habits, rng: random.Random) -> list[str]:
    """The code of each turn of one attempt. The last turn completes the task, the others do not."""
    turns, slips = family.turns(values), family.slips(values)
    unread = family.documented is not None and rng.random() < habits.skip_docs
    codes = []
    for position in range(1 if unread else 0, len(turns)):
        last = position == len(turns) - 1
        chance = habits.slip_unread if unread and last else habits.slip
        while slips[position] and rng.random() < chance:
            codes.append(_favourite(slips[position], rng).code)
            chance = habits.slip_again
        codes.append(turns[position])
    wrong_end = habits.wrong_end_unread if unread else habits.wrong_end
    if family.name in habits.careful:
        wrong_end = habits.wrong_end_careful
    if rng.random() < wrong_end:
        codes[-1] = rng.choice(family.wrong_ends(values)).code
    return codes


def _favourite(options: Sequence, rng: random.Random):
    """One of the options, the first ones more often: habits, not noise."""
    return rng.choices(options, weights=[1 / (1 + position) for position in range(len(options))])[0]


class ScriptedExperts:
    """A `Generate` that types one script a trajectory.

    Args:
        tokenizer: encodes the turns.
        scripts: the code of each turn, for each row of the batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scripts: Sequence[Sequence[str]]):
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._turns: dict[int, tuple[int, Iterator[str]]] = {}

    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """The next turn of each request's script."""
        return [Turn(ids=self._turn(request)[: request.max_new_tokens]) for request in requests]

    def _turn(self, request: TurnRequest) -> list[int]:
        prompt_length, rest = self._turns.get(request.trajectory, (len(request.ids), None))
        if len(request.ids) == prompt_length:  # the first turn, also of a second start on a fresh world
            rest = iter(self._scripts[request.trajectory])
        self._turns[request.trajectory] = (prompt_length, rest)
        text = f"```python\n{next(rest, GIVE_UP)}\n```{self._tokenizer.eos_token}"
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
