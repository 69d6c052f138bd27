"""What a run pushes to the Hub: the real client of huggingface_hub talks to a stand-in on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub.hub_worker import MODEL, SECRET
from tests.support.hub import running_hub

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ALWAYS = {"README.md", "training_curves.png", "training_args.bin"}


@pytest.fixture
def hub():
    with running_hub() as hub:
        yield hub
        assert [line for line in hub.unknown if not line.startswith(("HEAD", "GET"))] == []


@pytest.fixture
def worker(hub, tmp_path):
    def work(name: str, folder: str = "work", **options) -> dict:
        environment = {**os.environ, **hub.client_env(str(tmp_path / "hf")), "PYTHONPATH": str(ROOT)}
        (tmp_path / folder).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "tests.hub.hub_worker", name, str(tmp_path / folder), json.dumps(options)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        work.log = done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return work


def pushed(hub) -> set[str]:
    return hub.model(MODEL).files.keys() - {".gitattributes"}


def test_a_pushed_model_loads_and_samples_the_same_tokens(hub, worker):
    result = worker("push")
    assert pushed(hub) == WEIGHTS | TOKENIZER | ALWAYS
    assert result["loaded"] == result["trained"] != result["base"]
    assert result["chat"].startswith("<|im_start|>user\nHi")
    assert hub.model(MODEL).files["training_curves.png"].startswith(b"\x89PNG")
    assert b"](training_curves.png)" in hub.model(MODEL).files["README.md"]


def test_a_pushed_adapter_loads_and_samples_the_same_tokens(hub, worker):
    result = worker("push", adapter=True)
    assert pushed(hub) == ADAPTER | TOKENIZER | ALWAYS
    assert result["loaded"] == result["trained"] != result["base"]


def test_every_save_is_pushed(hub, worker):
    worker("save", hub_strategy="every_save", hub_always_push=True)
    messages = [message for message, _ in hub.model(MODEL).commits]
    assert [m for m in messages if m.startswith("Training in progress")] == [
        "Training in progress, step 1",
        "Training in progress, step 2",
    ]
    assert pushed(hub) == WEIGHTS | TOKENIZER | {"README.md", "training_curves.png", "training_args.bin"}


def test_a_pushed_checkpoint_resumes(hub, worker):
    worker("save", hub_strategy="checkpoint", hub_always_push=True)
    checkpoint = {Path(path).name for path in pushed(hub) if path.startswith("last-checkpoint/")}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= checkpoint
    resumed = worker("resume", "other", max_steps=3)
    assert (resumed["step"], resumed["logged"]) == (3, [1, 2, 3])
    straight = worker("resume", "work", max_steps=3)
    assert resumed["weights"] == straight["weights"]


def test_no_text_of_a_task_is_uploaded(hub, worker, tmp_path):
    (tmp_path / "work" / "run").mkdir(parents=True)
    (tmp_path / "work" / "run" / "notes.txt").write_text(SECRET)
    options = {"hub_strategy": "all_checkpoints", "hub_always_push": True, "log_completions": True}
    worker("save", push_at_the_end=True, **options)
    run = tmp_path / "work" / "run"
    assert list(run.glob("completions/*.parquet"))
    assert SECRET in (run / "_trajectories" / "rank0.jsonl").read_text()
    warned = "These files may hold texts of tasks of AppWorld and are not uploaded: *.txt, completions/*.parquet."
    assert worker.log.count(warned) == 1
    assert not hub.sent(SECRET)
    assert not [path for path in pushed(hub) if "completions" in path or "trajectories" in path or "notes" in path]


def test_a_checkpoint_holds_back_what_is_not_known_to_be_harmless(hub, worker, tmp_path):
    """A file that another part of the package writes into a checkpoint stays, whatever its name is."""
    result = worker("push_with_buffer", hub_strategy="checkpoint", push_to_hub=True)
    assert result["written"]
    assert not hub.sent(SECRET)
    assert not [path for path in pushed(hub) if "buffer" in path]


def test_publishable_tasks_are_uploaded(hub, worker):
    worker("push", publishable=True, log_completions=True)
    assert [path for path in pushed(hub) if path.startswith("completions/")]
    assert hub.sent(SECRET)
    assert not [path for path in pushed(hub) if path.startswith("_")]


def test_a_repository_of_completions_is_refused_unless_the_tasks_are_publishable(hub, worker):
    options = {"log_completions": True, "log_completions_hub_repo": "someone/table"}
    error = worker("refused", **options)["error"]
    assert "log_completions_hub_repo='someone/table' would publish the texts of tasks of AppWorld" in error
    assert hub.repos == {}
    assert worker("refused", publishable=True, **options)["error"] is None
    assert ("dataset", "someone/table") in hub.repos


def test_results_go_to_the_benchmark_that_is_named(hub, worker):
    worker("push", hub_benchmark="someone/bench:dev_tasks", evaluated=True)
    (entry,) = yaml.safe_load(hub.model(MODEL).files[".eval_results/bench-dev.yaml"])
    assert entry["dataset"] == {"id": "someone/bench", "task_id": "dev_tasks"}
    assert 0 <= entry["value"] <= 100
