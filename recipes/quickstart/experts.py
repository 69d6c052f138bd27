"""Scripted experts with sloppy habits: they know the solution of every task, and still make mistakes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from gvpo_trl.pocket.families import Family, Values
from gvpo_trl.rollout.types import Turn, TurnRequest

GIVE_UP = "apis.supervisor.complete_task()"
"""What an expert types after its script, as when the last turn failed because a slip had done half of it."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of an expert's mistakes. The defaults give a start that GVPO can improve."""

    slip: float = 0.36
    """Probability that a turn is first written in a way that fails."""
    slip_again: float = 0.2
    """Probability that another slip follows a slip before the turn is right."""
    skip_docs: float = 0.5
    """Probability that the expert does not look into the docs."""
    slip_unread: float = 0.65
    """The value of `slip` for the turn that needs the docs when the expert did not read them."""
    wrong_end: float = 0.3
    """Probability that the last turn misses something and completes the task."""
    wrong_end_unread: float = 0.55
    """The value of `wrong_end` when the expert did not read the docs."""
    careful: tuple[str, ...] = ("note_create", "song_keep", "song_answer", "text_person")
    """Families whose experts slip as often but rarely end wrongly, so that the rewards of a group are equal."""
    wrong_end_careful: float = 0.03
    """The value of `wrong_end` for the families in `careful`."""


def script(family: Family, values: Values, habits: Habits, rng: random.Random) -> list[str]:
    """Write the code of each turn of one attempt. Only the last turn completes the task."""
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
    """Choose one of the options. Earlier ones are more likely, so that the mistakes are habits."""
    return rng.choices(options, weights=[1 / (1 + position) for position in range(len(options))])[0]


class ScriptedExperts:
    """A `Generate` that types one script for each trajectory.

    Args:
        tokenizer: the tokenizer that encodes the turns.
        scripts: the code of each turn, for each row of the batch.
        language: the label of the code's fence.
        give_up: the code of a turn behind the end of a script.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        scripts: Sequence[Sequence[str]],
        language: str = "python",
        give_up: str = GIVE_UP,
    ):
        self._tokenizer = tokenizer
        self._language, self._give_up = language, give_up
        self._scripts = scripts
        self._turns: dict[int, tuple[int, Iterator[str]]] = {}

    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """Return the next turn of each request's script."""
        return [Turn(ids=self._turn(request)[: request.max_new_tokens]) for request in requests]

    def _turn(self, request: TurnRequest) -> list[int]:
        prompt_length, rest = self._turns.get(request.trajectory, (len(request.ids), None))
        # The prompt alone means a first turn: of a new trajectory, or of one that starts again on a fresh world.
        if len(request.ids) == prompt_length:
            rest = iter(self._scripts[request.trajectory])
        self._turns[request.trajectory] = (prompt_length, rest)
        text = f"```{self._language}\n{next(rest, self._give_up)}\n```{self._tokenizer.eos_token}"
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
