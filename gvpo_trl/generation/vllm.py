"""Samples turns with vLLM one by one: a trajectory's next turn is requested as soon as its code has run.

The thread of the rollout loop drives a colocated engine step by step (`EngineTurns`). With a server, threads of the
main process post requests through TRL's client (`ServerTurns`). Processes that share a server, or an engine by tensor
parallelism, exchange requests and turns (`SharedTurns`).

The engine, its settings and the weight sync, which empties the prefix cache, belong to TRL's `vllm_generation`. Its
`generate` is not called, because it waits for the slowest row of a batch, has one budget for all rows, and splits the
answer as if every process had the same number of rows. Trajectories of different lengths leave different numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model

from gvpo_trl.faults import GenerationFault
from gvpo_trl.generation.sharing import SharedTurns
from gvpo_trl.rollout.types import StreamingGenerate, Turn, TurnRequest

MAX_POSTS = 64
"""Number of requests that a server gets at once, which is the size of the connection pool of TRL's client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """What the trainer provides for sampling with vLLM."""

    engine: Any
    """TRL's `VLLMGeneration`, which holds the settings, the weight sync, and the engine or the client of a server."""
    end_ids: Sequence[int]
    """Ids that end a turn."""
    greedy: bool
    """Whether to take the most likely token each time, whatever TRL's temperature is."""
    process: int
    """Index of this process among all."""
    local_process: int
    """Index of this process on its machine."""
    processes: int
    """Number of processes."""


def engine_context_length(engine: Any, is_main: bool) -> int:
    """Return the most tokens that vLLM takes in one request, prompt and turn together.

    With a server this is a collective call, since only the main process has a client.

    Args:
        engine: TRL's `VLLMGeneration`.
        is_main: whether this is the main process.
    """
    if engine.mode != "server":
        return engine.llm.llm_engine.model_config.max_model_len
    limit = [engine.vllm_client.get_server_info()["model_config"]["max_model_len"] if is_main else None]
    return broadcast_object_list(limit)[0]


@contextmanager
def vllm_session(source: EngineSource) -> Iterator[StreamingGenerate]:
    """Yield a `StreamingGenerate` that uses TRL's vLLM; its weights must have been synchronized before."""
    engine = source.engine
    with _awake(engine), ExitStack() as stack:
        if engine.mode == "server":
            posts = stack.enter_context(ServerTurns(engine, Sampling(source))) if source.process == 0 else None
            if source.processes == 1:
                yield posts
                return
            shared = SharedTurns(_gather_all, source.process, source.processes, posts)
        else:
            turns = stack.enter_context(EngineTurns(engine, Sampling(source)))
            if engine.tensor_parallel_size == 1:
                yield turns
                return
            if is_peft_model(engine.model):  # TRL does the same before it generates: NCCL must drain first (trl#3671)
                torch.distributed.barrier(device_ids=[source.local_process])
            rank = torch.distributed.get_rank(group=engine.tp_group)
            shared = SharedTurns(_gather_over(engine), rank, engine.tensor_parallel_size, turns, everywhere=True)
        with shared:
            yield shared


def _gather_all(message: Any) -> list[Any]:
    return gather_object([message])


def _gather_over(engine: Any) -> Callable[[Any], list[Any]]:
    def gather(message: Any) -> list[Any]:
        messages = [None] * engine.tensor_parallel_size
        torch.distributed.all_gather_object(messages, message, group=engine.tp_group)
        return messages

    return gather


@contextmanager
def _awake(engine: Any) -> Iterator[None]:
    """Keep an engine with TRL's sleep mode awake for the whole rollout, since a sleep empties its prefix cache."""
    if engine.mode == "server" or not engine.enable_sleep_mode:
        yield
        return
    if engine._llm_weights_sleeping:  # level 2 sleep discards the weights, so they are synchronized again
        engine.sync_weights()
    engine.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        engine.llm.sleep(level=2)
        engine._llm_weights_sleeping = True


class Sampling:
    """Makes the sampling settings of each request: those that TRL's `generate` would use, with the request's budget.

    Args:
        source: what the trainer provides for the session.
    """

    def __init__(self, source: EngineSource):
        engine = source.engine
        self._settings = {
            "repetition_penalty": engine.repetition_penalty,
            "temperature": 0.0 if source.greedy else engine.temperature,
            "top_p": engine.top_p,
            "top_k": engine.top_k,
            "min_p": engine.min_p or 0.0,
            "logprobs": engine.logprobs,
            "max_tokens": engine.max_completion_length,
        } | engine.generation_kwargs
        self._settings["n"] = 1
        # A template may end a turn with another token than the model's end-of-sequence token.
        stops = {*source.end_ids, *(self._settings.get("stop_token_ids") or ())}
        self._settings["stop_token_ids"] = sorted(stops)

    def __call__(self, request: TurnRequest) -> dict[str, Any]:
        """Return keyword arguments for vLLM's `SamplingParams`.

        With one `seed` in all requests, every trajectory of a group would have the same turns. So a seed of the user's
        only changes the requests' own seeds.
        """
        settings = self._settings | {"max_tokens": min(request.max_new_tokens, self._settings["max_tokens"])}
        if request.seed is not None and settings["temperature"] > 0:
            settings["seed"] = request.seed ^ (settings.get("seed") or 0)
        return settings


class EngineTurns:
    """Samples turns with a colocated engine, which the calling thread drives step by step.

    Args:
        engine: TRL's `VLLMGeneration` in mode `"colocate"`.
        sampling: makes the settings of a request.
    """

    def __init__(self, engine: Any, sampling: Callable[[TurnRequest], dict[str, Any]]):
        self._engine = engine.llm.llm_engine
        self._sampling = sampling
        self._regex = engine.structured_outputs_regex
        self._pending: dict[str, Future[Turn]] = {}
        self._count = 0
        self.prompt_tokens = 0
        """Number of prompt tokens of the turns that have ended."""
        self.cached_tokens = 0
        """Number of those prompt tokens that the prefix cache held."""

    def submit(self, request: TurnRequest) -> Future[Turn]:
        """Add the request to the engine. If the engine refuses it, only this request fails."""
        future: Future[Turn] = Future()
        name = f"{request.trajectory}-{self._count}"
        self._count += 1
        params = self._params(request)
        try:
            self._engine.add_request(name, {"prompt_token_ids": request.ids}, params)
        except Exception as error:  # a ValueError or a class of vLLM's own, depending on its version
            future.set_exception(GenerationFault(f"vLLM refused a prompt of {len(request.ids)} tokens: {error}"))
        else:
            self._pending[name] = future
        return future

    def advance(self) -> bool:
        """Run one step of the engine, and return whether it has requests left."""
        if self._pending:
            for output in self._engine.step():
                if output.finished:
                    self._end(output)
        return bool(self._pending)

    def __enter__(self) -> "EngineTurns":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pending:  # the rollout broke off; its turns must not appear in the next one
            self._engine.abort_request(list(self._pending))
            self._pending.clear()

    def _params(self, request: TurnRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        settings = self._sampling(request)
        structured = settings.get("structured_outputs")
        if self._regex is not None:
            settings["structured_outputs"] = StructuredOutputsParams(regex=self._regex)
        elif isinstance(structured, dict):
            settings["structured_outputs"] = StructuredOutputsParams(**structured)
        return SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)

    def _end(self, output: Any) -> None:
        future = self._pending.pop(output.request_id)
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        if completion.finish_reason in ("abort", "error") or not ids:
            future.set_exception(GenerationFault(f"vLLM ended a request with {completion.finish_reason!r}"))
            return
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        logprobs = completion.logprobs
        if logprobs is not None:
            logprobs = [at[token].logprob for at, token in zip(logprobs, ids, strict=True)]
        future.set_result(Turn(ids=ids, logprobs=logprobs))


class ServerTurns:
    """Samples turns with a vLLM server through TRL's client; each request has a thread of its own.

    Args:
        engine: TRL's `VLLMGeneration` in mode `"server"`, on the main process.
        sampling: makes the settings of a request.
    """

    def __init__(self, engine: Any, sampling: Callable[[TurnRequest], dict[str, Any]]):
        self._client = engine.vllm_client
        self._sampling = sampling
        self._regex = engine.structured_outputs_regex
        self._pool = ThreadPoolExecutor(MAX_POSTS, thread_name_prefix="vllm-post")

    def submit(self, request: TurnRequest) -> Future[Turn]:
        """Post the request from a thread."""
        return self._pool.submit(self._post, request)

    def advance(self) -> bool:
        """Return `False`, because the server samples by itself."""
        return False

    def __enter__(self) -> "ServerTurns":
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _post(self, request: TurnRequest) -> Turn:
        """Sample one turn.

        Raises:
            GenerationFault: the server refused this request.
            OSError: the server cannot be reached, which ends the rollout.
        """
        try:
            answer = self._client.generate(
                [request.ids],
                logprobs=None,
                structured_outputs_regex=self._regex,
                generation_kwargs=self._sampling(request),
            )
        except OSError:  # `requests` raises it after the client's own retries
            raise
        except Exception as error:
            raise GenerationFault(f"the server refused a prompt of {len(request.ids)} tokens: {error}") from error
        (ids,) = answer["completion_ids"]
        if not ids:
            raise GenerationFault("the server answered with an empty turn")
        if answer["logprobs"] is None:
            return Turn(ids=list(ids))
        pairs = zip(answer["logprobs"][0], answer["logprob_token_ids"][0], ids, strict=True)
        return Turn(ids=list(ids), logprobs=[top[tokens.index(token)] for top, tokens, token in pairs])
