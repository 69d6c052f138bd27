"""Runs in a process of its own, whose `HF_ENDPOINT` is the stand-in: `hub_worker.py WORK FOLDER JSON` prints JSON.

Each function below is a piece of work that a test asks for by its name, with the arguments in JSON.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from gvpo_trl import MultiTurnRollout
from gvpo_trl.environments.base import TaskSource
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import code, finish, make_trainer, score_of, tasks

SECRET = "the secret instruction"
"""Stands in the task's text and in every observation."""
MODEL = "someone/my-agent"
SCRIPT = [
    [code(f"print('{SECRET}')"), code("1/0"), finish(1, 0)],
    [code("1/0"), finish(0, 1)],
    [finish(1, 1)],
    [finish(1, 1)],
]
OURS = TaskSource(name="our tasks", slug="ours", is_publishable=True)
OFFICIAL = TaskSource(name="AppWorld", slug="appworld")


def data() -> Any:
    prompts = [[{"role": "user", "content": f"Do {SECRET} number {n}."}] for n in range(4)]
    return tasks(4).remove_columns("prompt").add_column("prompt", prompts)


def trainer(
    folder: Path, *, publishable: bool = False, adapter: bool = False, evaluated: bool = False, **options: Any
) -> Any:
    """Make a trainer with a base model in a folder, whose tasks may be published or not, evaluated after each step."""
    environment = ToyEnvironment(score=score_of)
    environment.source = OURS if publishable else OFFICIAL
    base = folder / "base"
    if not base.is_dir():
        tiny_model(tiny_tokenizer()).save_pretrained(base)
        tiny_tokenizer().save_pretrained(base)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    defaults = {"hub_model_id": MODEL, "max_steps": 2, "learning_rate": 1e-1, "model": str(base)}
    if evaluated:
        defaults |= {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
        defaults["eval_dataset"] = tasks(3, split=["dev"] * 3)
    return make_trainer(
        folder / "run",
        SCRIPT,
        train_dataset=data(),
        rollout_func=MultiTurnRollout(environment),
        peft_config=lora if adapter else None,
        **(defaults | options),
    )


def sampled(model: Any) -> list[int]:
    """Return the ids that a model samples after three ids, with a fixed seed."""
    torch.manual_seed(0)
    prompt = torch.tensor([[5, 6, 7]])
    output = model.eval().generate(
        prompt, do_sample=True, top_k=0, min_new_tokens=60, max_new_tokens=60, pad_token_id=0
    )
    return output[0, 3:].tolist()


def push(folder: Path, **options: Any) -> dict[str, Any]:
    """Train, push at the end, and load what was pushed."""
    made = trainer(folder, **options)
    made.train()
    made.push_to_hub()
    kind = AutoPeftModelForCausalLM if options.get("adapter") else AutoModelForCausalLM
    loaded = kind.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    before = sampled(AutoModelForCausalLM.from_pretrained(folder / "base"))
    return {
        "trained": sampled(made.accelerator.unwrap_model(made.model)),
        "loaded": sampled(loaded),
        "base": before,
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False),
    }


def save(folder: Path, *, push_at_the_end: bool = False, **options: Any) -> dict[str, Any]:
    """Train with pushes at every save."""
    made = trainer(folder, push_to_hub=True, save_strategy="steps", save_steps=1, **options)
    made.train()
    made._finish_current_push()
    if push_at_the_end:
        made.push_to_hub()
    return {"step": made.state.global_step}


class Buffer(TrainerCallback):
    """Writes a file of sampled texts into each checkpoint before it is pushed."""

    def on_save(self, args, state, control, **_):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "buffer.pt").write_bytes(SECRET.encode())


def push_with_buffer(folder: Path, **options: Any) -> dict[str, Any]:
    """Train with a callback that writes a buffer, then push the last checkpoint."""
    made = trainer(folder, save_strategy="steps", save_steps=1, callbacks=[Buffer()], **options)
    made.train()
    made._push_from_checkpoint(str(folder / "run" / "checkpoint-2"))
    made._finish_current_push()
    return {"written": (folder / "run" / "checkpoint-2" / "buffer.pt").is_file()}


def resume(folder: Path, **options: Any) -> dict[str, Any]:
    """Download the pushed checkpoint, resume from it, and train one more step."""
    checkpoint = Path(snapshot_download(MODEL, allow_patterns="last-checkpoint/*")) / "last-checkpoint"
    made = trainer(folder, **options)
    made.train(resume_from_checkpoint=str(checkpoint))
    weights = {name: value.double().sum().item() for name, value in made.model.state_dict().items()}
    return {
        "step": made.state.global_step,
        "logged": [entry["step"] for entry in made.state.log_history if "reward" in entry],
        "weights": sum(weights.values()),
    }


def refused(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the error that making the trainer raises."""
    try:
        trainer(folder, **options)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    work, place, arguments = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()):
        result = globals()[work](Path(place), **json.loads(arguments))
    print(json.dumps(result))
