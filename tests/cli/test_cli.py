"""The command line: what it accepts, and the short errors with which it refuses the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gvpo_trl import __version__
from gvpo_trl.cli import main as cli
from gvpo_trl.cli.arguments import ScriptArguments
from gvpo_trl.cli.config import nearest, parse_config, read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("recipes/*/config.yaml"))
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gvpo_trl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment or None)


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a configuration file with the given fields and returns its path."""

    def write(text: str = "", **fields) -> str:
        path = tmp_path / "config.yaml"
        base = {
            "model_name_or_path": "some/model",
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "bf16": False,
        }
        path.write_text(yaml.safe_dump(base | fields) + text)
        return str(path)

    return write


def fails(capsys, *arguments: str) -> str:
    """Run a command that must end with exit code 2 and at most two lines of error; return these lines."""
    assert cli.main(list(arguments)) == 2
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    assert len(text.splitlines()) <= 2
    return text


def test_help_lists_every_command_and_imports_nothing_slow():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gvpo_trl", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    for command in ("train", "evaluate", "view", "doctor", "appworld"):
        assert command in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gvpo_trl.cli.main" in imported
    assert not imported & {"torch", "transformers", "trl", "datasets", "numpy", "vllm"}


def test_version():
    assert run("--version").stdout.strip() == f"gvpo-trl {__version__}"


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_of_a_configured_command_lists_the_fields_of_all_three_classes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for field in ("--appworld_root", "--failure_penalty", "--lora_r", "--learning_rate", "--config"):
        assert field in text


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train"], ["doctor", "--nonsense"], ["nonsense"]])
def test_no_command_line_ends_in_a_traceback(arguments, capsys):
    try:
        cli.main(arguments)
    except SystemExit as exit_:
        assert exit_.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_key_in_the_file_names_the_nearest(config, capsys):
    path = config(lerning_rate=1e-5)
    assert "unknown key `lerning_rate`; did you mean learning_rate?" in fails(capsys, "train", "--config", path)


@pytest.mark.parametrize("option", ["--failure-penality", "--failure_penality=0.3"])
def test_an_unknown_option_names_the_nearest(config, capsys, option):
    text = fails(capsys, "train", "--config", config(), option, "0.3")
    assert "did you mean --failure_penalty?" in text


def test_an_abbreviated_option_is_unknown(config, capsys):
    assert "--learning_rat" in fails(capsys, "train", "--config", config(), "--learning_rat", "1e-5")


def test_a_name_near_to_none_gets_no_suggestion():
    assert nearest("--zzzzzz", ["learning_rate", "seed"], "--") == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 8.5}, "num_generations=8.5 must be a whole number"),
        ({"num_generations": True}, "num_generations=True must be a whole number"),
        ({"learning_rate": [1]}, "learning_rate=[1] must be a number"),
        ({"learning_rate": "fast"}, "invalid float value: 'fast'"),
        ({"use_peft": 3}, "use_peft=3 must be true or false"),
        ({"eval_strategy": False}, "quote it"),
        ({"dtype": "float8"}, "dtype='float8' is none of auto, bfloat16, float16, float32"),
        ({"difficulties": [1, 4]}, "difficulties are 1, 2 and 3"),
        ({"difficulties": [1.5]}, "difficulties=1.5 must be a whole number"),
        ({"max_train_tasks": 0}, "max_train_tasks=0 must be at least 1"),
        ({"max_episodes": 0}, "max_episodes=0 must be at least 1"),
        ({"step_timeout_s": 0}, "step_timeout_s=0"),
        ({"failure_penalty": -0.2}, "failure_penalty=-0.2 must be >= 0"),
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"shaping": "multiplicatve"}, "shaping='multiplicatve'"),
        ({"per_device_train_batch_size": 3}, "must be divisible by num_generations"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"env": "OMP_NUM_THREADS"}, "`env` must map"),
    ],
)
def test_a_wrong_value_in_the_file_is_explained(config, capsys, fields, message):
    assert message in fails(capsys, "train", "--config", config(**fields))


def test_a_key_given_twice_is_an_error(config, capsys):
    text = fails(capsys, "train", "--config", config("seed: 1\nseed: 2\n"))
    assert "`seed` is given twice" in text


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text\n", "", "a: [1\n", "a: 1\n\tb: 2\n"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path, content, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert str(path) in fails(capsys, "train", "--config", str(path))


def test_a_missing_file_is_an_error(capsys):
    assert "no configuration file nowhere.yaml" in fails(capsys, "train", "--config", "nowhere.yaml")


def test_config_without_a_path_is_an_error(capsys):
    assert "--config needs the path" in fails(capsys, "train", "--config")


def test_a_stray_word_is_an_error(config, capsys):
    path = config(per_device_train_batch_size=8)
    assert "unexpected argument 'stray'" in fails(capsys, "train", "--config", path, "stray")


def test_the_command_line_wins_over_the_file(config):
    path = config(per_device_train_batch_size=8, learning_rate="1e-4", difficulties=[1, 2], use_peft=True, lora_r=4)
    script, training, model = parse_config("train", ["--config", path])
    assert (script.difficulties, training.learning_rate, model.lora_r) == ([1, 2], 1e-4, 4)
    overrides = ["--learning_rate", "2e-4", "--difficulties", "3", "--lora-r", "8", "--use_peft", "false"]
    script, training, model = parse_config("train", [f"--config={path}", *overrides])
    assert (script.difficulties, training.learning_rate, model.lora_r, model.use_peft) == ([3], 2e-4, 8, False)


def test_env_of_a_file_is_set(config, monkeypatch):
    monkeypatch.setenv("GVPO_TEST_VARIABLE", "before")
    parse_config("train", ["--config", config(per_device_train_batch_size=8, env={"GVPO_TEST_VARIABLE": 1})])
    assert os.environ["GVPO_TEST_VARIABLE"] == "1"


def test_debug_shows_the_traceback(config, capsys, monkeypatch):
    path = config(lerning_rate=1)
    assert cli.main(["--debug", "train", "--config", path]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("GVPO_DEBUG", "1")
    assert cli.main(["train", "--config", path]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_root_without_data_is_a_user_error(config, capsys, tmp_path):
    path = config(per_device_train_batch_size=8, appworld_root=str(tmp_path))
    text = fails(capsys, "train", "--config", path)
    assert str(tmp_path) in text
    assert "gvpo-trl appworld pocket" in text


@pytest.mark.parametrize("path", RECIPES, ids=[path.parent.name for path in RECIPES])
def test_every_recipe_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, training, _ = parse_config("train", ["--config", str(path), *ON_CPU])
    assert isinstance(script, ScriptArguments)
    assert (path.parent / "README.md").is_file()
    # Clip-higher has an effect only if a generation batch feeds several updates.
    assert training.steps_per_generation * training.num_iterations > training.gradient_accumulation_steps


@pytest.mark.parametrize("name", ["qwen2.5-7b-lora", "qwen2.5-32b-lora"])
def test_the_paper_setting(name):
    folder = ROOT / "recipes" / name
    fields = read_yaml(folder / "config.yaml")
    processes = read_yaml(folder / "accelerate.yaml")["num_processes"]
    update = processes * fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"]
    updates_per_generation = fields["generation_batch_size"] * fields["num_iterations"] // update
    assert 72 * fields["num_generations"] % fields["generation_batch_size"] == 0, "tasks would be left out of an epoch"
    assert fields["save_steps"] % updates_per_generation == 0, "a checkpoint between generation boundaries"
    assert fields["max_steps"] % updates_per_generation == 0
    assert (fields["difficulties"], fields["num_generations"], fields["failure_penalty"]) == ([1, 2], 8, 0.2)
    assert fields["generation_batch_size"] // processes > fields["gradient_accumulation_steps"]


@pytest.mark.parametrize("name", ["qwen2.5-7b-lora", "qwen2.5-32b-lora"])
def test_every_value_of_the_paper_setting_says_whose_it_is(name):
    text = (ROOT / "recipes" / name / "config.yaml").read_text()
    for line in text.splitlines():
        if line and not line.startswith(("#", "output_dir", "report_to")):
            assert any(source in line for source in ("[paper]", "[LOOP]", "[DAPO]", "[ours]")), line


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """Make a local model folder with random weights."""
    from tests.support.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_train_then_resume_then_evaluate_an_adapter(config, tiny_folder, pocket_root, tmp_path, capsys):
    path = config(
        model_name_or_path=str(tiny_folder),
        appworld_root=str(pocket_root),
        prompt="compact",
        max_train_tasks=2,
        max_eval_tasks=2,
        max_episodes=4,
        num_generations=2,
        per_device_train_batch_size=2,
        max_turns=1,
        max_turn_length=4,
        use_peft=True,
        lora_target_modules=["q_proj", "v_proj"],
        max_steps=1,
        save_steps=1,
        report_to="none",
    )
    out = tmp_path / "out"
    assert cli.main(["train", "--config", path]) == 0
    assert (out / "adapter_model.safetensors").is_file()
    assert cli.main(["train", "--config", path, "--max_steps", "2", "--resume_from_checkpoint", "true"]) == 0
    assert (out / "checkpoint-2").is_dir()
    arguments = ["--adapter_name_or_path", str(out), "--report_path", str(tmp_path / "r.json"), "--eval_samples", "2"]
    assert cli.main(["evaluate", "--config", path, *arguments]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["tasks"], report["attempts"], report["split"], report["failed_step_share"]) == (2, 4, "dev", 1.0)
    missing = ["--resume_from_checkpoint", "true", "--output_dir", str(tmp_path / "empty")]
    capsys.readouterr()
    assert "holds no checkpoint" in fails(capsys, "train", "--config", path, *missing)
