"""The part of the vLLM session that needs no vLLM: budgets, cutting and the refusal of collective calls."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from gvpo_trl.generation.vllm import vllm_session
from gvpo_trl.rollout.types import TurnRequest


class Engine:
    """TRL's `VLLMGeneration` as far as the session calls it: ids count up from the last one of the prompt."""

    def __init__(self, mode="colocate", tensor_parallel_size=1, logprobs=True):
        self.mode, self.tensor_parallel_size, self.max_completion_length = mode, tensor_parallel_size, 16
        self.logprobs = logprobs
        self.budgets = []

    def generate(self, prompts, images, num_generations):
        assert images is None and num_generations == 1
        self.budgets.append(self.max_completion_length)
        ids = [[prompt[-1] + 1 + n for n in range(self.max_completion_length)] for prompt in prompts]
        logprobs = [[[-float(token)] for token in row] for row in ids] if self.logprobs else None
        return prompts, ids, logprobs, None


def trainer(engine, processes=1):
    return SimpleNamespace(vllm_generation=engine, accelerator=SimpleNamespace(num_processes=processes))


REQUESTS = [
    TurnRequest(trajectory=0, ids=[1, 10], max_new_tokens=2),
    TurnRequest(trajectory=1, ids=[20], max_new_tokens=4),
]


def test_every_turn_is_cut_to_its_own_budget():
    with vllm_session(trainer(Engine())) as generate:
        first, second = generate(REQUESTS)
    assert (first.ids, first.logprobs) == ([11, 12], [-11.0, -12.0])
    assert (second.ids, second.logprobs) == ([21, 22, 23, 24], [-21.0, -22.0, -23.0, -24.0])


def test_an_engine_without_logprobs_gives_turns_without():
    with vllm_session(trainer(Engine(logprobs=False))) as generate:
        assert [turn.logprobs for turn in generate(REQUESTS)] == [None, None]


def test_the_engine_runs_to_the_longest_budget_of_each_call_and_gets_its_own_back():
    engine = Engine()
    with vllm_session(trainer(engine)) as generate:
        generate(REQUESTS)
        generate(REQUESTS[:1])
    assert engine.budgets == [4, 2]
    assert engine.max_completion_length == 16


def test_the_engine_gets_its_budget_back_after_an_exception():
    engine = Engine()
    with pytest.raises(KeyboardInterrupt), vllm_session(trainer(engine)) as generate:
        generate(REQUESTS)
        raise KeyboardInterrupt
    assert engine.max_completion_length == 16


@pytest.mark.parametrize(("mode", "parallel"), [("server", 1), ("colocate", 2)])
def test_collective_generation_on_several_processes_is_refused(mode, parallel):
    said = rf"{mode}.*{parallel} on 2 processes.*Use vllm_mode='colocate'"
    with pytest.raises(ValueError, match=said), vllm_session(trainer(Engine(mode, parallel), processes=2)):
        pass


@pytest.mark.parametrize(("mode", "parallel", "processes"), [("colocate", 1, 2), ("server", 1, 1), ("colocate", 2, 1)])
def test_other_settings_are_taken(mode, parallel, processes):
    with vllm_session(trainer(Engine(mode, parallel), processes)) as generate:
        assert len(generate(REQUESTS)) == 2


def test_the_module_does_not_import_vllm():
    code = "import sys; import gvpo_trl.generation.vllm; print('vllm' in sys.modules, 'trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
