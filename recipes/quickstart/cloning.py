"""Clones the behaviour in transcripts with a small Qwen2, and draws the values of a transcript anew at each use.

The last thing that a model of this size learns is to copy a value out of the task or an observation. Three measures
help. Every value is one token, so a transcript gets other values by a substitution of ids. Tokens of values weigh more
in the loss. The batches also hold short drills, in which copying is the only thing to learn.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gvpo_trl.pocket.families import PEOPLE, POOLS, closed_sets, pool
from gvpo_trl.rollout.types import Trajectory

SLOTS = {
    "words": ("title", "content", "label", "subject", "body", "message", "query", "description", "name", "note"),
    "first_names": ("query", "name", "receiver_email", "user_email", "phone_number"),
    "artists": ("query", "name", "answer"),
    "numbers": ("amount", "snooze_minutes"),
    "times": ("time",),
}
"""Arguments that a drill fills with values of each kind."""
VERBS = ("Send", "Make a", "Use", "With", "Set", "The")
CALLS = (("venmo", "search_users"), ("simple_note", "search_notes"), ("spotify", "search_songs"), ("phone", "login"))
VALUE_WEIGHT = 3.0
"""Weight of a value's token in the loss. Every other token that the expert typed has weight 1."""


@dataclass(frozen=True, slots=True)
class Example:
    """A token sequence and the weight of each token as a target."""

    ids: list[int]
    weights: list[float]


def small_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Make an untrained Qwen2 of about a million parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    # Rows of the embedding get about unit length. At the usual scale of 0.02, what the layers add to a token's
    # embedding hides which token it is, and the model does not learn to copy within these steps.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    return model


class Substitution:
    """Replaces each value of a token sequence by another value of its kind, wherever it occurs.

    A person's first name, address and phone number are replaced together, so that what an app shows stays consistent.

    Args:
        tokenizer: a tokenizer that has one token for each value.
        pools: the value pools to draw from. Values of other pools stay as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pools: Sequence[str]):
        sets = closed_sets()
        people = pool(PEOPLE, *pools)
        kinds = ("words", "artists", "numbers", "times")
        groups = [[(value,) for value in pool(sets[kind], *pools)] for kind in kinds]
        groups += [[(value,) for value in sets["genres"]]]
        groups += [[(person.first_name, person.email, person.phone_number) for person in people]]
        self._size = len(tokenizer)
        ids = tokenizer.convert_tokens_to_ids
        self._groups = [torch.tensor([ids(list(row)) for row in group]) for group in groups]

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw a table (V,) that gives the id to put in the place of each id."""
        table = torch.arange(self._size)
        for group in self._groups:
            table[group] = group[torch.randperm(len(group), generator=generator)]
        return table


def drills(tokenizer: PreTrainedTokenizerFast, count: int, rng: random.Random) -> list[Example]:
    """Make short conversations in which the only thing to learn is where a value comes from."""
    sets = closed_sets()
    examples = []
    for _ in range(count):
        user, code = rng.choice((_named_values, _named_values, _listed_ids, _printed_values))(sets, rng)
        head = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        turn = f"```python\n{code}\n```<|im_end|>"
        head_ids = tokenizer(head, add_special_tokens=False)["input_ids"]
        turn_ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        examples.append(Example(head_ids + turn_ids, [0.0] * len(head_ids) + [1.0] * len(turn_ids)))
    return examples


def _named_values(sets: dict, rng: random.Random) -> tuple[str, str]:
    """Make a call from the values that a sentence names, with its arguments in another order."""
    kinds = rng.choices(list(SLOTS), weights=(3, 3, 1, 1, 1), k=rng.choice((1, 2, 3)))
    slots = {rng.choice(SLOTS[kind]): rng.choice(sets[kind]) for kind in kinds}
    user = rng.choice((", ", " and ", ". ")).join(f"{slot} {value}" for slot, value in slots.items())
    asked = rng.sample(list(slots.items()), len(slots))
    arguments = [f"{slot}={value}" if value.isdigit() else f'{slot}="{value}"' for slot, value in asked]
    app, api = rng.choice(CALLS)
    return f"{rng.choice(VERBS)} {user}.", f"apis.{app}.{api}({', '.join(arguments)}, access_token=token)"


def _listed_ids(sets: dict, rng: random.Random) -> tuple[str, str]:
    """Pick one of three numbered lines by its name."""
    shown = rng.sample(sets[rng.choice(("words", "first_names"))], 3)
    wanted = rng.randrange(3)
    lines = "\n".join(f"{1 + position} {value}" for position, value in enumerate(shown))
    return f"{shown[wanted]}.\n{lines}\n", f"id={1 + wanted}"


def _printed_values(sets: dict, rng: random.Random) -> tuple[str, str]:
    """Repeat what an observation shows. A few values that are not wanted stand before it."""
    kinds = rng.choice((("words", "numbers"), ("artists", "genres"), ("first_names", "numbers"), ("artists", "words")))
    values = [rng.choice(sets[kind]) for kind in kinds]
    before = " ".join(rng.sample(sets["words"], rng.randrange(3)))
    code = f'apis.supervisor.complete_task(answer="{values[0]} {values[1]}")'
    return f"{rng.choice(VERBS)} {before}.\n\nOutput:\n```\n{values[0]} {values[1]}\n\n```", code


class Mixture:
    """Yields batches of transcripts and drills, whose values are drawn anew each time.

    Args:
        tokenizer: a tokenizer that has one token for each value.
        transcripts: what the experts did.
        drills: short examples. Their values come from all pools, so that the model learns the token of each value.
        seed: seed of the order and of the values.
        share: share of drills among the sequences.
        pools: the value pools that the transcripts are shown with. A pretrained model has met every word, so by
            default this one meets every word as well. The held-out values are held out from GVPO's training alone.
        max_tokens: most tokens of a batch, padding included.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        transcripts: Sequence[Example],
        drills: Sequence[Example],
        *,
        seed: int,
        share: float,
        pools: Sequence[str] = POOLS,
        max_tokens: int = 3072,
    ):
        self._pad = tokenizer.pad_token_id
        self._kinds = (
            (transcripts, Substitution(tokenizer, pools)),
            (drills, Substitution(tokenizer, POOLS)),
        )
        self._values = torch.zeros(len(tokenizer), dtype=torch.bool)
        for values in closed_sets().values():
            self._values[tokenizer.convert_tokens_to_ids(list(values))] = True
        self._share, self._max_tokens = share, max_tokens
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (B, T) ids, padded on the right, and (B, T) weights, without end."""
        return padded_batches(self._draw, self._rng, self._pad, self._max_tokens)

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        examples, substitution = self._kinds[self._rng.random() < self._share]
        example = self._rng.choice(examples)
        ids = substitution.draw(self._generator)[torch.tensor(example.ids)]
        weights = torch.tensor(example.weights)
        return ids, torch.where(self._values[ids], VALUE_WEIGHT * weights, weights)


def padded_batches(
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]], rng: random.Random, pad_id: int, max_tokens: int = 3072
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (B, T) ids, padded on the right, and (B, T) weights, without end.

    Args:
        draw: gives the ids (T,) and weights (T,) of the next sequence.
        rng: shuffles the batches.
        pad_id: id of the padding.
        max_tokens: most tokens of a batch, padding included.
    """
    while True:
        rows = [draw() for _ in range(512)]
        rows.sort(key=lambda row: len(row[0]))  # Rows of about the same length need little padding.
        batches, batch = [], []
        for row in rows:
            if batch and (len(batch) + 1) * len(row[0]) > max_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
        rng.shuffle(batches)
        for batch in batches:
            ids, weights = zip(*batch, strict=True)
            yield pad_sequence(ids, True, pad_id), pad_sequence(weights, True, 0.0)


def clone(
    model: Qwen2ForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    *,
    learning_rate: float = 2e-3,
    warmup: int = 50,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the model on the weighted cross-entropy of the batches' tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.05)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / max(1, steps))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for step, (ids, weights) in zip(range(steps), batches, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            # No token attends to the padding, because it stands on the right.
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            wanted = weights[:, 1:] > 0
            logits = model.lm_head(hidden[wanted])  # (N, V)
        losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
        targets = weights[:, 1:][wanted]
        loss = (losses * targets).sum() / targets.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step, loss.item())
    model.eval()


def example(trajectory: Trajectory) -> Example:
    """Take the ids exactly as the loop made them. The tokens that the expert typed are the targets."""
    ids, weights = list(trajectory.prompt_ids), [0.0] * len(trajectory.prompt_ids)
    for step in trajectory.steps:
        ids += step.action_ids + step.bridge_ids
        weights += [1.0] * len(step.action_ids) + [0.0] * len(step.bridge_ids)
    return Example(ids, weights)


class Progress:
    """Prints the mean loss every few steps."""

    def __init__(self, steps: int, every: int = 25):
        self._steps, self._every = steps, every
        self._started, self._losses = time.perf_counter(), []

    def __call__(self, step: int, loss: float) -> None:
        """Record a step's loss."""
        self._losses.append(loss)
        if (step + 1) % self._every == 0 or step + 1 == self._steps:
            mean = sum(self._losses) / len(self._losses)
            seconds = time.perf_counter() - self._started
            print(f"step {step + 1}/{self._steps}: loss {mean:.3f}, {seconds:.0f} s", file=sys.stderr, flush=True)
            self._losses.clear()


def save(model, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, tokenizer and generation settings."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
