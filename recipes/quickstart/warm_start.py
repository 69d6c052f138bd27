"""Makes the quickstart's small starting agent again, from nothing.

    python recipes/quickstart/warm_start.py --output recipes/quickstart/model

Scripted experts with sloppy habits solve tasks in the real AppWorld engine, and a Qwen2 of a million parameters learns
to imitate their transcripts. The tasks are others than the quickstart's, because they are drawn with another seed. The
agent meets every word, as a pretrained model has: the held-out words are held out from GVPO's training alone. The
command takes eight minutes of processor time. Its result is in the repository, so nobody has to run it.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from cloning import Example, Mixture, Progress, clone, drills, example, save, small_model
from experts import Habits, ScriptedExperts, script
from tokenizer import build_tokenizer
from transformers import PreTrainedTokenizerFast

from gvpo_trl.environments.appworld import AppWorldEnvironments, load_tasks
from gvpo_trl.environments.appworld.setup import make_pocket
from gvpo_trl.pocket.families import load_task
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.types import Trajectory

SEED_OFFSET = 1000
"""Difference between the seeds of the warm start's tasks and the quickstart's, so that no task is in both."""
BUDGETS = Budgets(max_turns=12, max_turn_length=96, max_observation_length=80, max_completion_length=1600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gvpo-warm-start-") as folder:
        work = Path(options.work or folder)
        root = work / "pocket"
        make_pocket(root, seed=SEED_OFFSET + options.seed, venv=options.venv, extra=sizes(options.episodes))
        tokenizer = build_tokenizer(root / "data" / "api_docs" / "standard")
        print(f"[{time.perf_counter() - started:5.0f} s] tokenizer of {len(tokenizer)} tokens", flush=True)
        transcripts = cached_transcripts(options, work, root, tokenizer)
        print(f"[{time.perf_counter() - started:5.0f} s] {len(transcripts)} transcripts", flush=True)
    model = small_model(tokenizer, options.seed)
    rng = random.Random(options.seed)
    exercises = drills(tokenizer, 5000, rng)
    shown = {"pools": options.pools.split(","), "seed": options.seed}
    copying = Mixture(tokenizer, transcripts, exercises, share=1.0, **shown)
    mixture = Mixture(tokenizer, transcripts, exercises, share=0.3, **shown)
    batches = itertools.chain(itertools.islice(copying, options.steps // 4), mixture)
    clone(model, batches, options.steps, report=Progress(options.steps))
    save(model, tokenizer, Path(options.output))
    print(f"[{time.perf_counter() - started:5.0f} s] saved in {options.output}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the quickstart's starting agent.")
    parser.add_argument("--output", required=True, help="folder for model and tokenizer")
    parser.add_argument("--episodes", type=int, default=576, help="transcripts to collect (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1100, help="cloning steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of tasks, experts and weights (default: %(default)s)"
    )
    parser.add_argument(
        "--pools", default="train,dev,test", help="value pools that transcripts show (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--venv", help="AppWorld's virtual environment (default: the one in the user's cache)")
    parser.add_argument("--work", help="folder to keep the tasks and transcripts in, and to take them from again")
    return parser.parse_args(arguments)


def sizes(episodes: int) -> tuple[str, ...]:
    """Return arguments of the pocket generator, for train tasks alone and about four attempts at each."""
    scenarios = max(1, round(episodes / 4 / 12 / 3))  # There are 12 families and 3 tasks a scenario.
    return (f"--train-scenarios={scenarios}", "--dev-scenarios=0", "--test-scenarios=0", "--challenge-scenarios=0")


def cached_transcripts(
    options: argparse.Namespace, work: Path, root: Path, tokenizer: PreTrainedTokenizerFast
) -> list[Example]:
    """Read the transcripts in the work folder, or collect them when it has none."""
    path = work / "transcripts.json"
    if not path.is_file():
        with AppWorldEnvironments(root=root, venv=options.venv, max_episodes=8) as environments:
            trajectories = collect(environments, root, tokenizer, options)
        describe(trajectories)
        path.write_text(json.dumps([asdict(example(trajectory)) for trajectory in trajectories]))
    return [Example(**row) for row in json.loads(path.read_text())]


def collect(
    environments: AppWorldEnvironments, root: Path, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> list[Trajectory]:
    """Let the experts attempt the tasks in turn, through the same rollout loop as the agent."""
    tasks = load_tasks("train", root=root, prompt="compact")
    rows = [tasks[number % len(tasks)] for number in range(options.episodes)]
    rng, scripts = random.Random(options.seed), []
    for row in rows:
        family, values = load_task(root, row["task_id"])
        scripts.append(script(family, values, Habits(), rng))
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    loop = RolloutLoop(environments, chat, BUDGETS)
    experts = ScriptedExperts(tokenizer, scripts)
    trajectories = loop.run([row["task_id"] for row in rows], [row["prompt"] for row in rows], experts)
    return [trajectory for trajectory in trajectories if trajectory.score is not None]


def describe(trajectories: Sequence[Trajectory]) -> None:
    """Print how good the experts are."""
    from gvpo_trl.evaluation import summarize

    print({name: round(value, 3) for name, value in summarize(trajectories).items()}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
