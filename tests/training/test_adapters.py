"""The root of a saved folder holds the adapter that was trained, whatever its name and however many there are."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import FAIL, finish, make_trainer

SCRIPT = [[FAIL, finish(1, 1)], [finish(2, 0)]]
LORA = LoraConfig(r=4, target_modules="all-linear")


def trainer_of(folder, names, active, steps=2):
    tokenizer = tiny_tokenizer()
    model = get_peft_model(tiny_model(tokenizer), LORA, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, LORA)
    model.set_adapter(active)
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "max_steps": steps}
    return make_trainer(folder, SCRIPT, model=model, tokenizer=tokenizer, **options)


def weights(model, name):
    return {key: value.clone() for key, value in model.state_dict().items() if f".{name}." in key and "lora_B" in key}


@pytest.mark.parametrize(
    ("names", "active"),
    [
        (["default"], "default"),
        (["first"], "first"),
        (["default", "second"], "second"),
        (["first", "second"], "second"),
    ],
)
def test_the_root_holds_the_trained_adapter(tmp_path, names, active):
    trainer = trainer_of(tmp_path, names, active)
    trainer.train()
    trainer.save_model()
    trained = weights(trainer.model, active)
    assert all(value.any() for value in trained.values()), "the adapter was trained"
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        loaded = PeftModel.from_pretrained(tiny_model(tiny_tokenizer()), folder)
        values = list(weights(loaded, "default").values())
        assert all(torch.equal(one, two) for one, two in zip(values, trained.values(), strict=True))
    for name in set(names) - {active}:
        file = load_file(tmp_path / name / "adapter_model.safetensors")
        assert not any(value.any() for key, value in file.items() if "lora_B" in key), "the others stay untrained"


def test_a_resume_finds_every_adapter_under_its_name(tmp_path):
    whole = trainer_of(tmp_path, ["default", "second"], "second")
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", ["default", "second"], "second")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name in ("default", "second"):
        one, two = weights(whole.model, name), weights(resumed.model, name)
        assert all(torch.equal(one[key], two[key]) for key in one)
