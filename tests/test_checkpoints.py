"""Checkpoints, adapters, resuming and the model card work as in TRL, and the card names GVPO."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gvpo_trl.reporting.traces import read_traces
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import FAIL, finish, make_trainer

SCRIPT = [[FAIL, finish(1, 0)], [FAIL, finish(0, 1)], [finish(1, 1)], [finish(1, 1)]]


def lora(**options) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)


def saved_model(folder):
    """Save the tiny model and its tokenizer as a local model folder."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_adapter_saves_loads_and_resumes(tmp_path):
    base, out = saved_model(tmp_path / "base"), tmp_path / "run"
    options = {
        "model": base,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    trainer = make_trainer(out, SCRIPT, peft_config=lora(), **options)
    trainer.train()
    trainer.save_model()
    assert (out / "adapter_model.safetensors").is_file()

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    ids = torch.tensor([[5, 6, 7]])
    trained = trainer.model.eval()
    torch.testing.assert_close(loaded(ids).logits, trained(ids).logits)
    assert not torch.allclose(loaded(ids).logits, AutoModelForCausalLM.from_pretrained(base)(ids).logits, atol=1e-5)

    resumed = make_trainer(out, SCRIPT, peft_config=lora(), **(options | {"max_steps": 2}))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert [entry["step"] for entry in resumed.state.log_history if "reward" in entry] == [1, 2]
    first, second = (load_file(out / f"checkpoint-{n}" / "adapter_model.safetensors") for n in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert "trained with GVPO" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "variant",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"init_lora_weights": "pissa"}],
    ids=["lora", "rslora", "dora", "pissa"],
)
def test_lora_variants_take_a_step(tmp_path, variant):
    trainer = make_trainer(tmp_path, SCRIPT, peft_config=lora(**variant), learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_an_adapter_samples_its_own_turns(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=lora(), max_turn_length=5, max_turns=2)
    trainer.train()
    assert trainer.state.log_history[0]["rollout/turns"] == 2.0


def test_a_run_resumes_where_it_stood(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, SCRIPT, max_steps=2, **options).train()
    traces = tmp_path / "_trajectories" / "rank0.jsonl"
    assert len(list(read_traces(tmp_path))) == 8
    with traces.open("a") as file:
        file.write('{"schema": 1, "mode": "tr')  # as if the run had been killed while it wrote

    resumed = make_trainer(tmp_path, SCRIPT, max_steps=3, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    steps = [trace["step"] for trace in read_traces(tmp_path)]
    assert steps == [0] * 4 + [1] * 4 + [2] * 4
    assert [entry["step"] for entry in resumed.state.log_history if "reward" in entry] == [1, 2, 3]


def test_the_same_seed_gives_the_same_run(tmp_path):
    runs = []
    for name in ("one", "two"):
        trainer = make_trainer(tmp_path / name, max_turn_length=5, max_turns=2, max_steps=2, learning_rate=1e-2)
        trainer.train()
        runs.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    assert runs[0] == runs[1]


def test_the_model_card_names_and_cites_gvpo(tmp_path):
    trainer = make_trainer(tmp_path / "run", SCRIPT, model=saved_model(tmp_path / "base"))
    trainer.train()
    trainer.create_model_card(model_name="my-agent", dataset_name="appworld", tags=["agents"])
    card = (tmp_path / "run" / "README.md").read_text()
    for words in (
        "my-agent",
        "trained with GVPO",
        "Cite GVPO as",
        "Group Verification-based Policy Optimization for Interactive Coding Agents",
        "https://openreview.net/forum?id=RY47Tq0VsV",
        "- gvpo",
        "- trl",
        "- agents",
        "appworld",
    ):
        assert words in card
    assert "[None]" not in card
    assert "co/None" not in card


def test_push_to_hub_uploads_model_tokenizer_and_card(tmp_path, monkeypatch):
    """Only the Hub's client is replaced. It is asked to upload what the run has written."""
    uploads = []

    class Client:
        def upload_folder(self, *, repo_id, folder_path, **options):
            uploads.append((repo_id, folder_path, options))

    monkeypatch.setattr("transformers.trainer.hf_api", Client)
    trainer = make_trainer(tmp_path, SCRIPT)
    trainer.hub_model_id = "someone/my-agent"
    trainer.train()
    trainer.push_to_hub(commit_message="End of training")
    ((repo, folder, options),) = uploads
    assert (repo, folder, options["commit_message"]) == ("someone/my-agent", str(tmp_path), "End of training")
    written = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= written
    assert "Cite GVPO as" in (tmp_path / "README.md").read_text()


def test_training_arguments_are_saved_with_the_checkpoint(tmp_path):
    make_trainer(tmp_path, SCRIPT, save_strategy="steps", save_steps=1, failure_penalty=0.3).train()
    arguments = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert (arguments.failure_penalty, arguments.loss_type) == (0.3, "grpo")
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["log_history"][0]["steps/failed"] == 2 / 6
