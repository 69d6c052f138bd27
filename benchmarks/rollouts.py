"""Compares whole rollouts here with TRL's tool loop: `python -m benchmarks.rollouts --root DIR`.

`gvpo-trl appworld pocket --root DIR` makes the data. Both sides run `_generate_and_score_completions` on the same
tasks: they open worlds, sample turns, run the code and the unit tests. TRL's side is its own `environment_factory`
loop with one tool, `execute(code)`; ours is `MultiTurnRollout`. The model has the quickstart's shape and random
weights. A logits processor dictates the sampled tokens, so both sides run the same code in the same worlds, in turns
of the same number of tokens: each statement of a task's solution is a turn. TRL samples one more turn per trajectory,
a single end-of-turn token, because its loop ends on a turn without a tool call.
"""

import argparse
import ast
import copy
import functools
import json
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LogitsProcessor, PreTrainedTokenizerFast, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.common import finish, interleaved, random_qwen2, ratio
from gvpo_trl import GVPOConfig, GVPOTrainer, MultiTurnRollout
from gvpo_trl.environments.appworld import AppWorldEnvironments, load_tasks
from gvpo_trl.rollout.chat import Chat
from recipes.quickstart.tokenizer import build_tokenizer

OBSERVATION_TOKENS = 80
TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\n' }}"
    "{% if message['role'] == 'tool' %}{{ 'Output:\n```\n' + message['content'] + '\n```' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The quickstart's template with tool calls. It does not list the tools, so the prompt is the same on both sides."""


class ScriptedModel(Qwen2ForCausalLM):
    """A model that runs every forward pass but samples the tokens that `script(ids)` gives for a row's ids."""

    script = None

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(_Forced(self.script))
        return processors


class _Forced(LogitsProcessor):
    def __init__(self, script):
        self._script = script
        self._turns: list[list[int]] = []
        self._start = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._turns:
            self._turns = [self._script(row) for row in input_ids.tolist()]
            self._start = input_ids.shape[1]
        position = input_ids.shape[1] - self._start
        wanted = [turn[min(position, len(turn) - 1)] for turn in self._turns]
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, torch.tensor(wanted, device=scores.device).unsqueeze(1), 0.0)


class Turns:
    """The turns of every task as token ids, in TRL's format and in ours; a turn has the same length in both."""

    def __init__(self, root: Path, task_ids: Sequence[str], tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.prompt_ends = 2  # end-of-turn tokens of a prompt: the system's and the user's message
        codes = {task_id: _codes(root, task_id) for task_id in task_ids}
        self.count = {task_id: len(turns) for task_id, turns in codes.items()}
        self._ids = {
            task_id: [[self._encode(code, tools) for code in turns] for tools in (False, True)]
            for task_id, turns in codes.items()
        }

    def script(self, tools: bool):
        """Return a function that gives the ids of the next turn for a row's ids."""
        return functools.partial(self._next, tools)

    def _encode(self, code: str, tools: bool) -> list[int]:
        call = json.dumps({"name": "execute", "arguments": {"code": code}})
        texts = f"```python\n{code}\n```", f"<tool_call>\n{call}\n</tool_call>"
        ours, theirs = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        filler = self.tokenizer(".", add_special_tokens=False)["input_ids"]
        longest = max(len(ours), len(theirs)) + 1
        ids = theirs if tools else ours
        newline = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
        return filler * (longest - len(ids) - 1) + newline + ids + [self.tokenizer.eos_token_id]

    def _next(self, tools: bool, row: list[int]) -> list[int]:
        turn = (row.count(self.tokenizer.eos_token_id) - self.prompt_ends) // 2
        task_id = re.search(r"Number ([0-9a-f]{7}_\d)", self.tokenizer.decode(row)).group(1)
        turns = self._ids[task_id][tools]
        return turns[turn] if turn < len(turns) else [self.tokenizer.eos_token_id]


def _codes(root: Path, task_id: str) -> list[str]:
    source = (root / "data" / "tasks" / task_id / "ground_truth" / "solution.py").read_text()
    body = ast.parse(source).body[0].body
    return [ast.unparse(statement) for statement in body]


class Slow:
    """Environments whose steps take `delay_s` longer, as with a remote server."""

    def __init__(self, environments: AppWorldEnvironments):
        self.environments = environments
        self.max_episodes = environments.max_episodes
        self.delay_s = 0.0
        self.steps = 0

    def open(self, task_id: str) -> Any:
        """Open an episode whose steps are delayed."""
        episode = self.environments.open(task_id)
        step = episode.step

        def slow_step(code: str) -> Any:
            time.sleep(self.delay_s)
            self.steps += 1
            return step(code)

        episode.step = slow_step
        return episode

    def close(self) -> None:
        """End the processes."""
        self.environments.close()


def _tool(environments: Slow, chat: Chat) -> type:
    class Tool:
        """The environment that TRL makes for each row of a batch."""

        def reset(self, task_id: str, **_: Any) -> None:
            self._episode = environments.open(task_id)

        def execute(self, code: str) -> str:
            """Run code.

            Args:
                code: Python source.

            Returns:
                What it printed.
            """
            return chat.cut(self._episode.step(code).text, OBSERVATION_TOKENS)

        def _score(self) -> float:
            try:
                return self._episode.score().reward
            finally:
                self._episode.close()

    return Tool


def _score(environments: list[Any], **_: Any) -> list[float]:
    """Compute the rewards of TRL's side at the same time, as a careful user would."""
    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(lambda environment: environment._score(), environments))


def main() -> None:
    options = _options()
    tokenizer = build_tokenizer(options.root / "data" / "api_docs" / "standard")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", '{"name": "execute", "arguments": {"code": "'])
    tokenizer.chat_template = TEMPLATE
    rows = load_tasks("train", root=options.root, prompt=options.prompt).select(range(options.tasks))
    rows = rows.map(lambda row: {"prompt": _numbered(row)})
    turns = Turns(options.root, rows["task_id"], tokenizer)
    batch = options.tasks * options.samples
    environments = Slow(AppWorldEnvironments(options.root, max_episodes=batch, venv=options.venv))
    theirs = _their_trainer(options, tokenizer, rows, turns, environments)
    ours = _our_trainer(options, tokenizer, rows, turns, environments)
    inputs = [dict(row) for row in rows for _ in range(options.samples)]
    result: dict[str, Any] = {"benchmark": "rollouts", "threads": torch.get_num_threads(), "trajectories": batch}
    result["turns"] = sum(turns.count[row["task_id"]] for row in inputs) / batch
    lengths = [len(tokenizer.apply_chat_template(row["prompt"], return_dict=False)) for row in rows]
    result["prompt_tokens"] = max(lengths)
    try:
        for name, delay_s in (("", 0.0), ("_slow_env", options.delay)):
            environments.delay_s = delay_s
            seconds = _measure(options, environments, {"trl": theirs, "ours": ours}, inputs)
            for side in ("trl", "ours"):
                result[f"{side}_per_s{name}"] = batch / min(seconds[side])
            result[f"ratio{name}"] = ratio(seconds["trl"], seconds["ours"])
    finally:
        environments.close()
    finish(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="data root of the pocket tasks")
    parser.add_argument("--venv", type=Path, help="AppWorld's virtual environment, if it is not the default one")
    parser.add_argument("--prompt", default="react", help="system prompt of load_tasks")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="trajectories per task")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that a slow environment adds to each step")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _numbered(row: dict[str, Any]) -> list[dict[str, str]]:
    *head, user = row["prompt"]
    return [*head, {**user, "content": f"Number {row['task_id']}. {user['content']}"}]


def _measure(options: argparse.Namespace, environments: Slow, trainers: dict, inputs: list[dict]) -> dict:
    steps, rewards = [], []

    def run(trainer: Any) -> None:
        environments.steps = 0
        trainer.model.train()
        batch = trainer._generate_and_score_completions(copy.deepcopy(inputs))
        steps.append(environments.steps)
        rewards.append(trainer._metrics["train"]["reward"][-1])
        assert len(batch["completion_ids"]) == len(inputs)

    ways = {name: functools.partial(run, trainer) for name, trainer in trainers.items()}
    interleaved(ways, 1)  # starts the hosts and fills the caches
    seconds, _ = interleaved(ways, options.repeats)
    assert len(set(steps)) == len(set(rewards)) == 1, f"both run the same code: {steps} steps, rewards {rewards}"
    return seconds


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.tasks * options.samples,
        "num_generations": options.samples,
        "max_completion_length": 2000,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "report_to": "none",
    }


def _model(tokenizer: PreTrainedTokenizerFast, turns: Turns, tools: bool) -> Qwen2ForCausalLM:
    model = random_qwen2(len(tokenizer), layers=4, hidden=128, heads=4, intermediate=512)
    model.__class__ = ScriptedModel
    model.script = turns.script(tools)
    return model


def _their_trainer(options, tokenizer, rows: Dataset, turns: Turns, environments: Slow) -> GRPOTrainer:
    tokenizer.response_template = qwen3_template
    trainer = GRPOTrainer(
        _model(tokenizer, turns, tools=True),
        _score,
        GRPOConfig(**_settings(options)),
        rows,
        processing_class=tokenizer,
        environment_factory=_tool(environments, Chat(tokenizer, [tokenizer.eos_token_id])),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _our_trainer(options, tokenizer, rows: Dataset, turns: Turns, environments: Slow) -> GVPOTrainer:
    settings = _settings(options) | {"max_turns": 10, "max_turn_length": 200}
    trainer = GVPOTrainer(
        _model(tokenizer, turns, tools=False),
        args=GVPOConfig(**settings, max_observation_length=OBSERVATION_TOKENS, log_trajectories=False),
        train_dataset=rows,
        rollout_func=MultiTurnRollout(environments),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


if __name__ == "__main__":
    main()
