"""The vLLM session with a stand-in for the engine and the client. tests/vllm_engine tests it with the real ones."""

import inspect
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from gvpo_trl.faults import GenerationFault
from gvpo_trl.generation.vllm import EngineSource, EngineTurns, Sampling, ServerTurns, vllm_session
from gvpo_trl.rollout.types import StreamingGenerate, TurnRequest
from tests.support.rolling import GENEROUS_S

END = 7


class CountingEngine:
    """Stands in for vLLM's `LLMEngine`. A step adds to each request the id that follows its last one."""

    def __init__(self, longest=100):
        self.longest = longest
        self.live = {}
        self.params = []
        self.broken = set()

    def add_request(self, name, prompt, params):
        if len(prompt["prompt_token_ids"]) > self.longest:
            raise ValueError("longer than the maximum model length")
        self.params.append(params)
        self.live[name] = (prompt["prompt_token_ids"], [], params)

    def step(self):
        ended = []
        for name, (prompt, ids, params) in list(self.live.items()):
            ids.append((ids or prompt)[-1] + 1)
            broken = name in self.broken
            if broken or len(ids) == params.max_tokens or ids[-1] in params.stop_token_ids:
                ended.append(_output(name, prompt, ids, params, "abort" if broken else "stop"))
                del self.live[name]
        return ended

    def abort_request(self, names):
        for name in names:
            del self.live[name]


def _output(name, prompt, ids, params, reason):
    logprobs = None
    if params.logprobs is not None:  # a token that is not sampled may have a higher probability
        logprobs = [{0: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=-float(token))} for token in ids]
    completion = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(
        request_id=name, finished=True, outputs=[completion], prompt_token_ids=prompt, num_cached_tokens=1
    )


@pytest.fixture(autouse=True)
def vllm_names(monkeypatch):
    names, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    names.SamplingParams = SimpleNamespace
    inner.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    inner.StructuredOutputsParams = lambda **options: ("structured", options)
    monkeypatch.setitem(sys.modules, "vllm", names)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)


def make_source(engine=None, client=None, *, rank=0, processes=1, **changes):
    values = {
        "mode": "colocate" if client is None else "server",
        "llm": SimpleNamespace(llm_engine=engine or CountingEngine()),
        "vllm_client": client,
        "tensor_parallel_size": 1,
        "enable_sleep_mode": False,
        "structured_outputs_regex": None,
        "repetition_penalty": 1.0,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "logprobs": 0,
        "max_completion_length": 50,
        "generation_kwargs": {},
    }
    return EngineSource(
        engine=SimpleNamespace(**(values | changes)),
        end_ids=[END],
        greedy=False,
        process=rank,
        local_process=rank,
        processes=processes,
    )


def request(trajectory, ids, max_new_tokens=4, seed=None):
    return TurnRequest(trajectory=trajectory, ids=ids, max_new_tokens=max_new_tokens, seed=seed)


# The colocated engine


def test_every_request_has_its_own_budget_and_ends_alone():
    with vllm_session(make_source()) as turns:
        assert isinstance(turns, StreamingGenerate)
        short, long = turns.submit(request(0, [1, 10], 2)), turns.submit(request(1, [20], 4))
        assert [turns.advance(), turns.advance()] == [True, True]
        assert (short.done(), long.done()) == (True, False)
        later = turns.submit(request(0, [1, 10, 11, 12, 30], 1))  # the next turn, while another row is sampled
        assert [turns.advance(), turns.advance()] == [True, False]
    assert [future.result().ids for future in (short, long, later)] == [[11, 12], [21, 22, 23, 24], [31]]
    assert short.result().logprobs == [-11.0, -12.0]


def test_a_turn_ends_with_the_trainers_end_of_turn_token():
    with vllm_session(make_source()) as turns:
        future = turns.submit(request(0, [5], 20))
        while turns.advance():
            pass
    assert future.result().ids == [6, END]


def test_an_engine_without_logprobs_gives_turns_without():
    with vllm_session(make_source(logprobs=None)) as turns:
        future = turns.submit(request(0, [10], 1))
        turns.advance()
    assert future.result().logprobs is None


def test_a_request_that_the_engine_refuses_fails_alone():
    with vllm_session(make_source(CountingEngine(longest=3))) as turns:
        refused, taken = turns.submit(request(0, [1, 2, 3, 4])), turns.submit(request(1, [10], 1))
        turns.advance()
    with pytest.raises(GenerationFault, match=r"prompt of 4 tokens.*maximum model length"):
        refused.result()
    assert taken.result().ids == [11]


def test_a_request_that_the_engine_breaks_off_fails_alone():
    engine = CountingEngine()
    with vllm_session(make_source(engine)) as turns:
        broken, whole = turns.submit(request(0, [1])), turns.submit(request(1, [10], 1))
        engine.broken.update(name for name in engine.live if name.startswith("0-"))
        turns.advance()
    with pytest.raises(GenerationFault, match="abort"):
        broken.result()
    assert whole.result().ids == [11]


def test_a_rollout_that_breaks_off_leaves_nothing_in_the_engine():
    engine = CountingEngine()
    with pytest.raises(KeyboardInterrupt), vllm_session(make_source(engine)) as turns:
        turns.submit(request(0, [1]))
        turns.advance()
        assert engine.live
        raise KeyboardInterrupt
    assert not engine.live


def test_what_the_prefix_cache_held_is_counted():
    source = make_source()
    turns = EngineTurns(source.engine, Sampling(source))
    turns.submit(request(0, [10, 20, 30], 1))
    turns.advance()
    assert (turns.prompt_tokens, turns.cached_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"structured_outputs_regex": "a+"}, ("structured", {"regex": "a+"})),
        ({"generation_kwargs": {"structured_outputs": {"choice": ["a"]}}}, ("structured", {"choice": ["a"]})),
    ],
)
def test_structured_outputs_are_passed_on(changes, expected):
    engine = CountingEngine()
    with vllm_session(make_source(engine, **changes)) as turns:
        turns.submit(request(0, [1]))
    assert engine.params[0].structured_outputs == expected


class Sleeping:
    """An engine with TRL's sleep mode; `log` lists the calls that it got."""

    def __init__(self, asleep):
        self.log = []
        self.llm = SimpleNamespace(
            llm_engine=CountingEngine(),
            wake_up=lambda tags: self.log.append(f"wake {tags[0]}"),
            sleep=lambda level: self.log.append(f"sleep {level}"),
        )
        self.source = make_source(llm=self.llm, enable_sleep_mode=True, _llm_weights_sleeping=asleep)
        self.source.engine.sync_weights = lambda: self.log.append("sync")


@pytest.mark.parametrize("asleep", [True, False])
def test_the_engine_is_awake_for_the_whole_rollout_and_sleeps_after_it(asleep):
    engine = Sleeping(asleep)
    with pytest.raises(KeyboardInterrupt), vllm_session(engine.source) as turns:
        for turn in (1, 2):
            turns.submit(request(0, [turn], 1))
            turns.advance()
        engine.log.append("rollout")
        raise KeyboardInterrupt
    assert engine.log == [*["sync"] * asleep, "wake kv_cache", "rollout", "sleep 2"]
    assert engine.source.engine._llm_weights_sleeping


# Settings


def test_settings_are_those_of_trl_and_the_requests_budget():
    settings = Sampling(make_source(generation_kwargs={"stop": ["```\n"], "top_p": 0.9, "n": 4}))
    assert settings(request(0, [1], 9)) == {
        "repetition_penalty": 1.0,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": 0,
        "max_tokens": 9,
        "n": 1,
        "stop": ["```\n"],
        "stop_token_ids": [END],
    }


def test_a_users_own_budget_and_stop_tokens_are_kept():
    settings = Sampling(make_source(generation_kwargs={"max_tokens": 5, "stop_token_ids": [3]}))
    assert settings(request(0, [1], 9)) | {"max_tokens": 5, "stop_token_ids": [3, END]} == settings(request(0, [1], 9))


def test_each_request_is_sampled_with_its_own_seed():
    def seed(given, **options):
        return Sampling(make_source(**options))(request(0, [1], seed=given)).get("seed")

    assert (seed(7), seed(8), seed(None)) == (7, 8, None)
    user = {"generation_kwargs": {"seed": 5}}
    assert len({seed(7, **user), seed(8, **user), 7, 8}) == 4, "a seed of the user's changes every request's"


# The server


class Client:
    """Stands in for TRL's client. It answers only when `together` requests are under way at once."""

    def __init__(self, together=1, error=None, logprobs=True):
        self.barrier, self.error, self.logprobs = threading.Barrier(together), error, logprobs
        self.settings = []

    def generate(self, prompts, logprobs, structured_outputs_regex, generation_kwargs):
        self.settings.append(generation_kwargs)
        self.barrier.wait(GENEROUS_S)
        if self.error is not None and prompts[0][-1] == 0:
            raise self.error
        token = prompts[0][-1] + 1
        scores = {"logprobs": [[[-0.1, -float(token)]]], "logprob_token_ids": [[[0, token]]]}
        if not self.logprobs:
            scores = {"logprobs": None, "logprob_token_ids": None}
        return {"completion_ids": [[token]], **scores}


def test_requests_are_under_way_at_the_server_at_the_same_time():
    client = Client(together=3)
    with vllm_session(make_source(client=client)) as turns:
        futures = [turns.submit(request(row, [10 * row + 1], row + 1)) for row in range(3)]
        assert turns.advance() is False
        assert [future.result(GENEROUS_S).ids for future in futures] == [[2], [12], [22]]
    assert futures[1].result().logprobs == [-12.0]
    assert sorted(settings["max_tokens"] for settings in client.settings) == [1, 2, 3]


def test_a_server_without_logprobs_gives_turns_without():
    with vllm_session(make_source(client=Client(logprobs=False))) as turns:
        assert turns.submit(request(0, [1])).result(GENEROUS_S).logprobs is None


def test_a_request_that_the_server_refuses_fails_alone():
    with vllm_session(make_source(client=Client(error=Exception("Request failed: 400, too long")))) as turns:
        refused, taken = turns.submit(request(0, [0])), turns.submit(request(1, [1]))
        with pytest.raises(GenerationFault, match=r"prompt of 1 tokens.*400, too long"):
            refused.result(GENEROUS_S)
        assert taken.result(GENEROUS_S).ids == [2]


def test_a_server_that_is_gone_is_no_fault_of_one_request():
    source = make_source(client=Client(error=ConnectionError("gone")))
    with ServerTurns(source.engine, Sampling(source)) as turns, pytest.raises(ConnectionError):
        turns.submit(request(0, [0])).result(GENEROUS_S)


READ = [
    "mode",
    "llm",
    "vllm_client",
    "model",
    "tensor_parallel_size",
    "tp_group",
    "enable_sleep_mode",
    "_llm_weights_sleeping",
    "structured_outputs_regex",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logprobs",
    "max_completion_length",
    "generation_kwargs",
]


def test_trl_has_what_the_session_reads():
    source = inspect.getsource(VLLMGeneration)
    assert [name for name in READ if f"self.{name} = " not in source and f"self.{name}, _ = " not in source] == []
    parameters = inspect.signature(VLLMClient.generate).parameters
    assert {"prompts", "logprobs", "structured_outputs_regex", "generation_kwargs"} <= set(parameters)


def test_the_module_does_not_import_vllm():
    code = "import sys; import gvpo_trl.generation.vllm; print('vllm' in sys.modules, 'trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
