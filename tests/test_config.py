"""`GVPOConfig`: its defaults, the paper's names, its errors and its warnings."""

import warnings

import pytest
import torch
import yaml
from trl import GRPOConfig, TrlParser

from gvpo_trl import GVPOConfig


def config(tmp_path, **options) -> GVPOConfig:
    defaults = {"use_cpu": True, "bf16": False, "report_to": "none"}
    return GVPOConfig(output_dir=str(tmp_path), **(defaults | options))


def test_defaults_are_those_of_the_contract(tmp_path):
    args = config(tmp_path)
    wanted = {
        "loss_type": "grpo",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "num_generations": 8,
        "vllm_importance_sampling_mode": "token_truncate",
        "failure_penalty": 0.2,
        "shaping": "multiplicative",
        "failure_span": "turn",
        "loss_aggregation": None,
        "drop_small_advantages": 0.0,
        "no_code_is_failure": True,
        "log_trajectories": True,
    }
    assert {name: getattr(args, name) for name in wanted} == wanted


def test_nothing_else_of_trl_changes(tmp_path):
    ours, trls = config(tmp_path), GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    different = {name for name in GRPOConfig.__dataclass_fields__ if getattr(ours, name) != getattr(trls, name)}
    assert different == {
        "loss_type",
        "scale_rewards",
        "epsilon_high",
        "vllm_importance_sampling_mode",
        "max_completion_length",
    }


def test_every_new_option_is_documented_and_has_help():
    inherited = GRPOConfig.__dataclass_fields__
    for name, field in GVPOConfig.__dataclass_fields__.items():
        if name not in inherited:
            assert f"{name} (`" in GVPOConfig.__doc__, name
            assert field.metadata["help"], name


@pytest.mark.parametrize(
    ("paper", "trl"), [("smtm", "grpo"), ("smts", "dr_grpo"), ("token-mean", "dapo"), (None, "grpo")]
)
def test_loss_aggregation_sets_loss_type(tmp_path, paper, trl):
    assert config(tmp_path, loss_aggregation=paper).loss_type == trl


@pytest.mark.parametrize(
    ("paper", "trl"), [("smtm", "grpo"), ("smts", "dr_grpo"), ("token-mean", "dapo"), ("token-mean", "bnpo")]
)
def test_both_names_may_be_given_when_they_agree(tmp_path, paper, trl):
    assert config(tmp_path, loss_aggregation=paper, loss_type=trl).loss_type == trl


@pytest.mark.parametrize(
    ("paper", "trl"), [("smtm", "dapo"), ("smts", "grpo"), ("token-mean", "dr_grpo"), ("smtm", "cispo")]
)
def test_both_names_disagreeing_is_an_error(tmp_path, paper, trl):
    with pytest.raises(ValueError, match=f"loss_aggregation='{paper}'.*'{trl}'.*set one"):
        config(tmp_path, loss_aggregation=paper, loss_type=trl)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_losses_with_a_ratio_per_token_are_taken(tmp_path, loss_type):
    assert config(tmp_path, loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "vespo"}, "loss_type='vespo'.*use 'grpo'"),
        ({"loss_type": "sapo"}, "loss_type='sapo'.*use 'grpo'"),
        ({"loss_type": "luspo"}, "loss_type='luspo'.*use 'grpo'"),
        ({"loss_type": "gpro"}, "loss_type='gpro' must be one of grpo"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'.*use 'token'"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold=0.5.*delta"),
        ({"loss_aggregation": "mean"}, "loss_aggregation='mean' must be one of smtm, smts, token-mean"),
        ({"shaping": "negative"}, "shaping='negative' must be one of multiplicative, additive, none"),
        ({"failure_span": "line"}, "failure_span='line' must be one of turn, code"),
        ({"scale_rewards": "std"}, "scale_rewards='std' must be one of none, group, batch"),
        ({"failure_penalty": -0.2}, "failure_penalty=-0.2 must be >= 0.*turns shaping off"),
        ({"failure_penalty": float("nan")}, "failure_penalty=nan"),
        (
            {"stop_after_code": True, "use_vllm": True},
            "stop_after_code=True works without vLLM only.*include_stop_str",
        ),
        ({"drop_small_advantages": -1.0}, "drop_small_advantages=-1.0 must be >= 0"),
        ({"temperature": -0.5}, "temperature=-0.5 must be >= 0 and finite; 0 is greedy"),
        ({"temperature": float("inf")}, "temperature=inf must be >= 0 and finite"),
        ({"temperature": float("nan")}, "temperature=nan must be >= 0 and finite"),
        ({"temperature": None}, "temperature=None must be >= 0"),
        ({"temperature": "0"}, "temperature='0' must be >= 0"),
        ({"temperature": 1e-9}, "temperature=1e-09 must be 0, which is greedy, or at least 0.01"),
        ({"generation_kwargs": {"temperature": 0.3}}, "sets temperature=0.3.*temperature=1.0; set temperature alone"),
        ({"generation_kwargs": '{"temperature": 0}'}, "sets temperature=0.*temperature=1.0; set temperature alone"),
        ({"failure_penalty": None}, "failure_penalty=None must be >= 0"),
        ({"drop_small_advantages": None}, "drop_small_advantages=None must be >= 0"),
        ({"kv_cache_tokens": None}, "kv_cache_tokens=None must be >= 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k=-2 must be a whole number above 0; 0 keeps all"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        ({"min_p": 2.0}, "min_p=2.0 must be between 0 and 1"),
        ({"generation_kwargs": {"min_p": -1}}, "min_p=-1 must be between 0 and 1"),
        ({"generation_kwargs": {"num_beams": 2}}, "{'num_beams': 2} cannot sample turns; beams"),
        ({"generation_kwargs": {"num_return_sequences": 2}}, "'num_return_sequences': 2.*set num_generations"),
        ({"generation_kwargs": {"stop_strings": ["a"]}}, "'stop_strings'.*stop_after_code=True"),
        ({"generation_kwargs": {"do_sample": False}, "use_vllm": True}, "'do_sample'.*temperature=0 is greedy"),
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"max_turn_length": 0}, "max_turn_length=0 must be at least 1"),
        ({"max_observation_length": -3}, "max_observation_length=-3 must be at least 1"),
        ({"max_completion_length": None}, "max_completion_length=None must be at least 1"),
        ({"max_context_length": 1}, "max_context_length=1 must be at least 2, or unset"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True.*Leave it unset"),
        ({"remove_unused_columns": True}, "remove_unused_columns=True.*task_id.*False"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 6, "num_generations": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_generations": 4},
        {"num_generations": 1},
        {"per_device_eval_batch_size": 3, "num_generations": 2, "do_eval": True, "eval_strategy": "epoch"},
    ],
)
def test_batches_hold_whole_groups(tmp_path, options):
    with pytest.raises(ValueError, match=r"divisible by|at least 2 generations"):
        config(tmp_path, **options)


@pytest.mark.parametrize(("option", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.05)])
def test_narrowed_sampling_biases_the_importance_ratio(tmp_path, option, value):
    """This is the case of trl#6789."""
    with pytest.warns(UserWarning, match=f"{option}={value} narrows.*importance ratio is biased.*Use top_p=1"):
        config(tmp_path, use_vllm=True, **{option: value})


def test_narrowed_sampling_by_generation_kwargs_is_seen(tmp_path):
    with pytest.warns(UserWarning, match="top_k=5 narrows"):
        config(tmp_path, use_vllm=True, generation_kwargs={"top_k": 5})


@pytest.mark.parametrize(
    "options",
    [
        {"use_vllm": True},
        {"use_vllm": True, "top_p": 0.9, "generation_kwargs": {"top_p": 1.0}},
        {"use_vllm": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"use_vllm": True, "top_p": None, "top_k": None, "min_p": None},
        {"use_vllm": True, "top_k": -1},
        {"use_vllm": True, "top_p": 0.9, "vllm_importance_sampling_correction": False},
        {"use_vllm": False, "top_p": 0.9},
    ],
)
def test_no_warning_where_the_ratio_is_right(tmp_path, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*importance ratio is biased")
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"report_to": "wandb"}, "a table of report_to='wandb'"),
        ({"report_to": ["tensorboard", "trackio"]}, "a table of report_to='trackio'"),
    ],
)
def test_each_tracker_that_completions_are_sent_to_is_named(tmp_path, options, place):
    with pytest.warns(UserWarning, match="sends the tasks' texts to .*log_completions=False") as warned:
        config(tmp_path, log_completions=True, **options)
    (text,) = [str(each.message) for each in warned if "sends" in str(each.message)]
    assert text.startswith(f"log_completions=True sends the tasks' texts to {place}. AppWorld")


def test_all_places_of_completions_are_named_at_once(tmp_path):
    with pytest.warns(UserWarning, match="report_to='wandb'.*; .*report_to='trackio'"):
        config(tmp_path, log_completions=True, report_to=["wandb", "trackio"])


@pytest.mark.parametrize(
    "options",
    [
        {"log_completions": True},
        {"log_completions": True, "report_to": "tensorboard"},
        {"log_completions": True, "push_to_hub": True},  # the upload leaves the tables out
        {"push_to_hub": True, "report_to": ["wandb", "trackio"]},
    ],
)
def test_no_warning_where_no_table_of_completions_leaves_the_machine(tmp_path, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sends the tasks' texts")
        config(tmp_path, **options)


def test_a_temperature_of_0_is_kept_for_evaluations(tmp_path):
    assert config(tmp_path, temperature=0).temperature == 0


def test_a_configuration_file_and_the_command_line(tmp_path):
    file = tmp_path / "config.yaml"
    values = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "learning_rate": 2.0e-5,
        "failure_penalty": 0.1,
        "loss_aggregation": "token-mean",
        "num_generations": 4,
        "max_turns": 7,
        "no_code_is_failure": False,
    }
    file.write_text(yaml.safe_dump(values))
    (args,) = TrlParser(GVPOConfig).parse_args_and_config(
        ["--config", str(file), "--max_turns", "9", "--shaping", "additive"]
    )
    assert isinstance(args, GVPOConfig)
    for name, value in (values | {"max_turns": 9, "shaping": "additive"}).items():
        assert getattr(args, name) == ([] if (name, value) == ("report_to", "none") else value), name
    assert args.loss_type == "dapo"


def test_to_dict_comes_back_the_same(tmp_path):
    args = config(tmp_path, loss_aggregation="smts", failure_penalty=0.4, max_context_length=99)
    values = {name: args.to_dict()[name] for name, field in args.__dataclass_fields__.items() if field.init}
    del values["generation_batch_size"]  # TRL derives it, and accepts only one of it and `steps_per_generation`
    again = GVPOConfig(**values)
    assert again.to_dict() == args.to_dict()
    assert args.to_dict()["loss_type"] == "dr_grpo"


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("0.3", 0.3),
        ('{"syntax": 0.4, "default": 0.1}', {"syntax": 0.4, "default": 0.1}),
        ('{"syntax": 0.4}', {"syntax": 0.4, "default": 0.2}),
    ],
)
def test_a_penalty_from_the_command_line_and_a_file_comes_back_the_same(tmp_path, given, held):
    common = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--shaping", "winners"]
    (args,) = TrlParser(GVPOConfig).parse_args_and_config([*common, "--failure_penalty", given])
    assert (args.failure_penalty, args.shaping) == (held, "winners")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"failure_penalty": yaml.safe_load(given)}))
    (args,) = TrlParser(GVPOConfig).parse_args_and_config([*common, "--config", str(file)])
    assert args.failure_penalty == held
    assert config(tmp_path, failure_penalty=args.to_dict()["failure_penalty"]).failure_penalty == held
    torch.save(args, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).failure_penalty == held
