"""Makes the small SQL agent again, from nothing.

    python -m recipes.sql.warm_start --output recipes/sql/model

Scripted experts with sloppy habits answer questions in the SQL environment, through the same rollout loop as the
agent, and a Qwen2 of a million parameters learns to imitate their transcripts. The databases are those of the split
`warm`, which no training and no evaluation uses; they have the words and shapes of all splits, as a pretrained model
has met every word. The weights are saved in half precision, so that they fit the repository.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from gvpo_trl.environments.sql import SqlEnvironments, load_tasks
from gvpo_trl.environments.sql.tasks import load_task
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.types import Trajectory
from recipes.quickstart.cloning import Example, Progress, clone, example, padded_batches, save, small_model
from recipes.quickstart.experts import ScriptedExperts
from recipes.sql.experts import GIVE_UP, Habits, script
from recipes.sql.tokenizer import build_tokenizer, value_tokens

BUDGETS = Budgets(max_turns=20, max_turn_length=96, max_observation_length=120, max_completion_length=1800)
VALUE_WEIGHT = 3.0
"""Weight in the loss of a word that a query copies. Every other token that the expert typed has weight 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    trajectories = collect(tokenizer, options)
    describe(trajectories)
    examples = [example(trajectory) for trajectory in trajectories]
    mean = sum(len(each.ids) for each in examples) / len(examples)
    print(f"[{time.perf_counter() - started:5.0f} s] {len(examples)} transcripts of {mean:.0f} tokens", flush=True)
    model = small_model(tokenizer, options.seed)
    clone(model, batches(tokenizer, examples, options.seed), options.steps, report=Progress(options.steps))
    save(model.half(), tokenizer, Path(options.output))
    print(f"[{time.perf_counter() - started:5.0f} s] saved in {options.output}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the small SQL agent.")
    parser.add_argument("--output", required=True, help="folder for model and tokenizer")
    parser.add_argument("--difficulties", type=int, nargs="+", default=[1], help="default: %(default)s")
    parser.add_argument("--episodes", type=int, default=6000, help="transcripts to collect (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="cloning steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of experts and weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    return parser.parse_args(arguments)


def collect(tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> list[Trajectory]:
    """Let the experts attempt a task of each question, through the same rollout loop as the agent."""
    count = -(-options.episodes // len(options.difficulties))
    tasks = load_tasks("warm", difficulties=options.difficulties, count=count)
    rng = random.Random(options.seed)
    ids, prompts = list(tasks["task_id"]), list(tasks["prompt"])
    scripts = [script(load_task(task_id), Habits(), rng) for task_id in ids]
    with SqlEnvironments(max_episodes=64, workers=1) as environments:
        loop = RolloutLoop(environments, Chat(tokenizer, [tokenizer.eos_token_id]), BUDGETS)
        trajectories = loop.run(ids, prompts, ScriptedExperts(tokenizer, scripts, "sql", GIVE_UP))
    return [trajectory for trajectory in trajectories if trajectory.score is not None]


def batches(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of transcripts without end, drawn at random."""
    rng = random.Random(seed)
    copied = torch.zeros(len(tokenizer), dtype=torch.bool)
    copied[tokenizer.convert_tokens_to_ids(value_tokens())] = True

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        each = rng.choice(examples)
        ids, weights = torch.tensor(each.ids), torch.tensor(each.weights)
        return ids, torch.where(copied[ids], VALUE_WEIGHT * weights, weights)

    return padded_batches(draw, rng, tokenizer.pad_token_id)


def describe(trajectories: Sequence[Trajectory]) -> None:
    """Print how good the experts are."""
    from gvpo_trl.evaluation import summarize

    print({name: round(value, 3) for name, value in summarize(trajectories).items()}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
