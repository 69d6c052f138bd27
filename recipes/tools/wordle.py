"""Wordle through an environment, in the shape of TRL's environment example. Only the trainer's class is GVPO's.

    python recipes/tools/wordle.py --model Qwen/Qwen3-0.6B

Each trajectory plays a game of its own. A guess that is no word of five letters raises, so its turn is a failed step.
"""

import argparse
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gvpo_trl import GVPOTrainer

WORDS = ("crane", "slate", "proud", "light")
GUESSES = 6


class Wordle:
    """A game: the agent finds a word of five letters."""

    def __init__(self) -> None:
        self.secret, self.guesses, self.best = "", 0, 0.0

    def reset(self, secret: str, **kwargs: Any) -> str:
        """Begin a game and return its first observation."""
        self.secret, self.guesses, self.best = secret, 0, 0.0
        return f" You have {GUESSES} guesses."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: A word of five letters.
        """
        word = word.lower()
        if len(word) != len(self.secret) or not word.isalpha():
            raise ValueError(f"{word!r} is not a word of {len(self.secret)} letters.")
        if self.guesses == GUESSES:
            raise ValueError("The game is over.")
        self.guesses += 1
        marks = "".join(
            "G" if letter == right else "Y" if letter in self.secret else "-"
            for letter, right in zip(word, self.secret, strict=True)
        )
        self.best = max(self.best, marks.count("G") / len(marks))
        return f"{word} {marks}"


def greens(environments: list[Wordle], **kwargs: Any) -> list[float]:
    """Return the largest share of letters that a guess of the game had in their places."""
    return [environment.best for environment in environments]


def tasks() -> Dataset:
    """Return one row per secret word."""
    prompt = [{"role": "user", "content": "Let us play Wordle. Guess my word with the tool."}]
    return Dataset.from_list([{"prompt": prompt, "secret": word} for word in WORDS])


def make_trainer(
    model: Any, args: GRPOConfig, trainer_class: type[GRPOTrainer] = GVPOTrainer, **options: Any
) -> GRPOTrainer:
    """Make the trainer of this script; `GRPOTrainer` works as well."""
    return trainer_class(
        model, reward_funcs=greens, args=args, train_dataset=tasks(), environment_factory=Wordle, **options
    )


def main() -> None:
    """Train a model of the Hub."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--output_dir", default="runs/wordle")
    options = parser.parse_args()
    args = GRPOConfig(
        output_dir=options.output_dir,
        max_completion_length=1024,
        max_tool_calling_iterations=GUESSES,
        chat_template_kwargs={"enable_thinking": False},
    )
    make_trainer(options.model, args).train()


if __name__ == "__main__":
    main()
