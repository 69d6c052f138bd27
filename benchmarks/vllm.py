"""Compares turns that vLLM's engine samples one by one with turns in lockstep: `python -m benchmarks.vllm`.

It runs in the environment of `make test-vllm`. Both ways run the same rollouts: `RolloutLoop` over one colocated
engine, greedy turns whose lengths are drawn beforehand, and episodes that only take time. The times of an interpreter
are log-normal with a median of 30 ms, and 5 % of them are 2 s. Lockstep is `LLM.generate` on the turns of all live
trajectories, then a wait for the slowest step. The prefix cache is emptied before each run.
"""

import argparse
import os
import random
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import END, finish, interleaved, random_qwen2, ratio
from gvpo_trl.environments.base import ResetResult, Score, StepResult
from gvpo_trl.generation.vllm import EngineTurns
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.types import Generate, StreamingGenerate, Trajectory, Turn, TurnRequest
from tests.support.tiny import tiny_tokenizer

MEDIAN_S, TAIL_S, TAIL_SHARE = 0.03, 2.0, 0.05
CODE = "```python\nstep\n```"


class _Times:
    """The interpreter times and turn lengths by (row, turn), which are the same in every run."""

    def __init__(self, rows: int, turns: int, new_tokens: int):
        draw = random.Random(0)
        places = [(row, turn) for row in range(rows) for turn in range(turns)]
        self.step_s = {
            place: TAIL_S if draw.random() < TAIL_SHARE else MEDIAN_S * draw.lognormvariate(0, 0.5) for place in places
        }
        self.length = {place: draw.randint(new_tokens // 2, new_tokens * 3 // 2) for place in places}


class _SlowEnvironment:
    """An environment whose steps only take time."""

    def __init__(self, rows: int, times: _Times):
        self.max_episodes, self.times = rows, times

    def open(self, task_id: str) -> "_SlowEpisode":
        return _SlowEpisode(int(task_id), self.times)

    def close(self) -> None:
        pass


class _SlowEpisode:
    def __init__(self, row: int, times: _Times):
        self.reset = ResetResult(task_id=str(row), seconds=0.0)
        self.row, self.times, self.turn = row, times, 0

    def step(self, code: str) -> StepResult:
        time.sleep(self.times.step_s[self.row, self.turn])
        self.turn += 1
        return StepResult(text="Execution successful.", failure=None)

    def score(self) -> Score:
        return Score(passed=(), failed=("none",))

    def close(self) -> None:
        pass


class _Sampling:
    """Greedy sampling settings; the n-th request of a row has the length that was drawn for its n-th turn."""

    def __init__(self, times: _Times):
        self._times, self._turn = times, {}

    def __call__(self, request: TurnRequest) -> dict[str, Any]:
        turn = self._turn[request.trajectory] = self._turn.get(request.trajectory, -1) + 1
        length = self._times.length[request.trajectory, turn]
        return {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "logprobs": 0}


class _Coded:
    """A streaming generator that puts code into the text of each turn, so that each turn runs a step."""

    def __init__(self, turns: StreamingGenerate):
        self.advance = turns.advance
        self._turns = turns

    def submit(self, request: TurnRequest) -> Any:
        future = self._turns.submit(request)
        result = future.result
        future.result = lambda: Turn(ids=result().ids, logprobs=result().logprobs, text=CODE)
        return future


def lockstep(llm: Any, sampling: _Sampling) -> Generate:
    """Make a `Generate` that waits for the longest turn of a batch."""
    from vllm import SamplingParams

    def generate(requests: list[TurnRequest]) -> list[Turn]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.ids} for request in requests],
            [SamplingParams(**sampling(request)) for request in requests],
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        return [
            Turn(
                ids=list(done.token_ids),
                logprobs=[at[token].logprob for at, token in zip(done.logprobs, done.token_ids, strict=True)],
                text=CODE,
            )
            for done in completions
        ]

    return generate


def make_engine(tokenizer: Any, context: int) -> Any:
    """Make a colocated engine as TRL does, with a small random model."""
    from vllm import LLM

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877"}
    os.environ.update(place)
    with tempfile.TemporaryDirectory() as folder:
        random_qwen2(len(tokenizer), layers=4, hidden=128, heads=4, intermediate=256).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return LLM(
            model=folder,
            max_model_len=context,
            distributed_executor_backend="external_launcher",
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            enforce_eager=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24, help="mean length of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        import tests.support.vllm_cpu  # noqa: F401 - sets the environment variables of vLLM's CPU build

    tokenizer = tiny_tokenizer()
    times = _Times(options.rows, options.turns, options.new_tokens)
    longest = 2 * options.new_tokens
    llm = make_engine(tokenizer, context=256 + options.turns * (longest + 128))
    budgets = Budgets(
        max_turns=options.turns,
        max_turn_length=longest,
        max_observation_length=64,
        max_completion_length=options.turns * (longest + 128),
        straggler_s=1e6,  # lockstep waits for the slowest step
    )
    rows = range(options.rows)

    def run(generate: Generate | StreamingGenerate) -> list[Trajectory]:
        llm.reset_prefix_cache()
        loop = RolloutLoop(_SlowEnvironment(options.rows, times), Chat(tokenizer, [END]), budgets)
        prompts = [[{"role": "user", "content": f"Task {row}. " + "Do it well. " * 10}] for row in rows]
        return loop.run([str(row) for row in rows], prompts, generate)

    engine = SimpleNamespace(llm=llm, structured_outputs_regex=None)
    ways = {
        "lockstep": lambda: run(lockstep(llm, _Sampling(times))),
        "ours": lambda: run(_Coded(EngineTurns(engine, _Sampling(times)))),
    }
    seconds, returned = interleaved(ways, options.repeats)
    turns = {name: [[step.action_ids for step in t.steps] for t in ts] for name, ts in returned.items()}
    finish(
        {
            "benchmark": "vllm",
            "rows": options.rows,
            "turns": options.turns,
            "lockstep_s": min(seconds["lockstep"]),
            "ours_s": min(seconds["ours"]),
            "identical_turns": turns["lockstep"] == turns["ours"],
            "slow_steps": sum(step_s == TAIL_S for step_s in times.step_s.values()),
            "ratio": ratio(seconds["lockstep"], seconds["ours"]),
        }
    )


if __name__ == "__main__":
    main()
