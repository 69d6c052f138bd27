"""`gvpo-trl train` and `evaluate`: what they hand to TRL."""

import json
from types import SimpleNamespace

import pytest
import trl.trainer.grpo_trainer
import trl.trainer.utils
from accelerate.utils import DistributedType
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from gvpo_trl.cli import main as cli
from gvpo_trl.cli.run import load_adapter


class Loaded(Exception):
    """Stops a test at the moment when a model would be loaded."""


@pytest.mark.parametrize("kind", list(DistributedType))
def test_the_model_under_an_adapter_loads_with_the_options_that_trl_uses(kind, tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    calls = []

    def create_model_from_path(*args, **options):
        calls.append((args, options))
        raise Loaded

    monkeypatch.setattr(trl.trainer.grpo_trainer, "create_model_from_path", create_model_from_path)
    monkeypatch.setattr(trl.trainer.utils, "create_model_from_path", create_model_from_path)
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, model_init_kwargs={"trust_remote_code": False})
    args.distributed_state = SimpleNamespace(distributed_type=kind)
    with pytest.raises(Loaded):
        GRPOTrainer("some/model", len, args)
    with pytest.raises(Loaded):
        load_adapter(str(tmp_path), args, ModelConfig(model_name_or_path="some/model"))
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("temperature: 0", "temperature=0"),
        ("generation_kwargs: {do_sample: false}", "generation_kwargs={do_sample: False}"),
        ("temperature: -1", "temperature=-1"),
    ],
)
def test_sampling_that_cannot_train_is_refused_before_anything_is_loaded(options, named, tmp_path, capsys):
    """Neither the data nor the model exists, so the error would name the data if that were read first."""

    def error(line: str) -> str:
        path = tmp_path / "config.yaml"
        base = f"model_name_or_path: {tmp_path}/model\noutput_dir: {tmp_path}/out\nappworld_root: {tmp_path}/data\n"
        path.write_text(f"{base}use_cpu: true\nbf16: false\n{line}\n")
        assert cli.main(["train", "--config", str(path)]) == 2
        return capsys.readouterr().err

    assert named in error(options)
    assert f"{tmp_path}/data" in error("temperature: 0.5")
    assert not (tmp_path / "out").exists()
