"""Rules and penalties from a configuration file and from the command line."""

import pytest
import yaml

from gvpo_trl.cli.config import parse_config
from gvpo_trl.step_advantages import RULES


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    fields = {"model_name_or_path": "a/b", "output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    fields |= {"failure_penalty": {"syntax": 0.4, "no_code": 0, "default": 0.1}, "no_code": "mask"}
    path.write_text(yaml.safe_dump(fields | {"per_device_train_batch_size": 8}))
    return str(path)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_name_for_the_command_line(file, name):
    assert parse_config("train", ["--config", file, "--shaping", name])[1].shaping == name


def test_a_mapping_in_a_file_and_on_the_command_line(file):
    _, args, _ = parse_config("train", ["--config", file])
    assert args.failure_penalty == {"syntax": 0.4, "no_code": 0.0, "default": 0.1}
    assert args.no_code == "mask"
    options = ["--failure_penalty", '{"api": 1}', "--no_code", "drop", "--failure_span", "statement"]
    _, args, _ = parse_config("train", ["--config", file, *options, "--caught_api_errors_fail", "true"])
    assert args.failure_penalty == {"api": 1.0, "default": 0.2}
    assert (args.no_code, args.failure_span, args.caught_api_errors_fail) == ("drop", "statement", True)
    assert parse_config("train", ["--config", file, "--failure_penalty", "0.3"])[1].failure_penalty == 0.3


@pytest.mark.parametrize("value", ["{syntax: 1}", '{"syntax": "1"}', "[1]", "true", '{"default": null}'])
def test_a_penalty_that_is_none_is_refused(file, value):
    with pytest.raises(ValueError, match=r"failure_penalty.*must be >= 0 and finite"):
        parse_config("train", ["--config", file, "--failure_penalty", value])
