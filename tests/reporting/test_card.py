"""What the model card says, in its text and in the metadata that the Hub reads."""

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig

from gvpo_trl import MultiTurnRollout
from gvpo_trl.environments.appworld import load_tasks
from gvpo_trl.environments.appworld.tasks import PROMPTS, check_root, matching_prompt, task_source
from gvpo_trl.environments.base import TaskSource
from gvpo_trl.reporting.card_facts import base_model, failing_steps
from gvpo_trl.reporting.uploads import UPLOADABLE, check_uploads
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import FAIL, finish, make_trainer, score_of, tasks

SCRIPT = [[FAIL, finish(1, 0)], [FAIL, finish(0, 1)], [finish(1, 1)], [finish(1, 1)]]
SECRET = "Kim's secret task"


def saved_model(folder):
    tiny_model(tiny_tokenizer()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def environment(source: TaskSource | None) -> ToyEnvironment:
    toy = ToyEnvironment(score=score_of)
    if source is not None:
        toy.source = source
    return toy


def card_of(tmp_path, source=None, train=True, **options) -> ModelCard:
    """Train two steps with an evaluation after each, and return the card."""
    trainer = make_trainer(
        tmp_path / "run",
        SCRIPT,
        rollout_func=MultiTurnRollout(environment(source)),
        max_steps=2,
        eval_dataset=options.pop("eval_dataset", tasks(3, split=["dev"] * 3)),
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        **options,
    )
    if train:
        trainer.train()
    trainer.create_model_card(model_name="my-agent")
    return ModelCard.load(tmp_path / "run" / "README.md")


def test_evaluations_are_results_of_the_metadata(tmp_path):
    card = card_of(tmp_path, TaskSource(name="AppWorld", slug="appworld"))
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures == {"task_goal_completion": 33.3, "scenario_goal_completion": 0.0, "reward": 0.5}
    (result, *_) = card.data.eval_results
    assert (result.dataset_type, result.dataset_name, result.dataset_split) == ("appworld", "AppWorld (dev)", "dev")
    assert "| dev | 33.3 | 0.0 | 0.500 | 2 |" in card.text
    assert ModelCardData(**yaml.safe_load(card.data.to_yaml())).eval_results == card.data.eval_results


def test_a_card_without_an_evaluation_claims_no_result(tmp_path):
    card = card_of(tmp_path, train=False)
    assert card.data.eval_results is None
    assert "## Results" not in card.text and "training_curves.png" not in card.text


def test_the_settings_are_the_resolved_ones(tmp_path):
    card = card_of(tmp_path, failure_penalty=0.3, loss_aggregation="smts", failure_span="code", max_turns=3)
    for row in (
        "| failure penalty b (`failure_penalty`) | 0.3 |",
        "| shaping (`shaping`) | multiplicative |",
        "| failure span (`failure_span`) | code |",
        "| loss aggregation (`loss_type`) | dr_grpo (smts) |",
        "| turns of a trajectory (`max_turns`) | 3 |",
        "- trl: 1.16",
    ):
        assert row in card.text
    assert "| failed | 33.3 % | 33.3 % |" in card.text
    assert (tmp_path / "run" / "training_curves.png").is_file()
    assert "](training_curves.png)" in card.text


@pytest.mark.parametrize(
    ("mode", "words"),
    [("multiplicative", "(1 + b) times"), ("additive", "advantage minus b"), ("none", "because `shaping` was `none`")],
)
def test_the_shaping_of_the_run_is_explained(tmp_path, mode, words):
    assert words in card_of(tmp_path, shaping=mode, train=False).text


def test_one_process_writes_the_card_alone(tmp_path, monkeypatch):
    """With a vLLM server the context of a rollout is a collective call, on which a single process would wait."""

    def collective(trainer):
        raise AssertionError("the card asked for the context of a rollout")

    monkeypatch.setattr("gvpo_trl.trainer.GVPOTrainer.rollout_context", collective)
    card = card_of(tmp_path, train=False, max_context_length=2000)
    assert "| tokens with the prompt (`max_context_length`) | 2000 |" in card.text


def test_an_adapter_has_the_metadata_of_peft(tmp_path):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True)
    card = card_of(tmp_path, peft_config=lora, model=saved_model(tmp_path / "base"), train=False)
    assert card.data.library_name == "peft"
    assert {"lora", "gvpo", "trl"} <= set(card.data.tags)
    assert "| adapter | LoRA, r=4, lora_alpha=8, use_rslora |" in card.text
    assert "AutoPeftModelForCausalLM.from_pretrained" in card.text
    assert "needs its base model, the local model `base`" in card.text
    assert str(tmp_path) not in card.content


def test_an_adapter_of_a_model_on_the_hub_names_it(tmp_path):
    model = tiny_model(tiny_tokenizer())
    model.config._name_or_path = "Qwen/Qwen2.5-0.5B-Instruct"
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    card = card_of(tmp_path, peft_config=lora, model=model, train=False)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "base_model:adapter:Qwen/Qwen2.5-0.5B-Instruct" in card.data.tags


def test_a_base_model_in_a_folder_has_the_name_of_the_folder(tmp_path):
    folder = tmp_path / "private" / "warm-start"
    folder.mkdir(parents=True)
    found = base_model(str(folder))
    assert (found.id, found.label) == (None, "the local model `warm-start`")
    checkpoint = tmp_path / "private" / "my-run" / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    assert base_model(str(checkpoint)).label == "the local model `my-run/checkpoint-10`"
    ModelCard("---\nbase_model: Qwen/Qwen2.5-7B\n---\n# x\n").save(folder / "README.md")
    assert "itself made from [Qwen/Qwen2.5-7B]" in base_model(str(folder)).label


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/cache/hub/models--Qwen--Qwen2.5-7B/snapshots/0abc", "Qwen/Qwen2.5-7B"),
        ("gpt2", "gpt2"),
        ("", None),
        (None, None),
        ("/no/such/folder", None),
    ],
)
def test_the_id_of_a_base_model(name, expected):
    assert base_model(name).id == expected


def test_several_evaluations_are_named_apart(tmp_path):
    sets = {"easy": tasks(2, split=["dev"] * 2), "hard": tasks(3)}
    assert {result.dataset_name for result in card_of(tmp_path, eval_dataset=sets).data.eval_results} >= {
        "tasks of an unknown source (easy)"
    }


def test_results_of_a_benchmark_have_the_hubs_newer_form(tmp_path):
    card_of(tmp_path, TaskSource(name="AppWorld", slug="appworld"), hub_benchmark="someone/bench")
    (entry,) = yaml.safe_load((tmp_path / "run" / ".eval_results" / "bench-dev.yaml").read_text())
    assert entry["dataset"] == {"id": "someone/bench", "task_id": "dev"}
    assert entry["value"] == 33.3
    assert entry["notes"].startswith("TGC in % on AppWorld (dev); SGC 0.0.")


@pytest.mark.parametrize("benchmark", ["appworld", "a/b/c", "someone/bench:", "some one/bench", ""])
def test_a_malformed_benchmark_is_an_error_before_the_model_loads(tmp_path, benchmark):
    with pytest.raises(ValueError, match=r"hub_benchmark=.*'owner/dataset'"):
        make_trainer(tmp_path, SCRIPT, hub_benchmark=benchmark)


def test_no_text_of_a_private_task_stands_in_the_card(tmp_path):
    prompt = [{"role": "system", "content": f"You serve {SECRET}."}, {"role": "user", "content": SECRET}]
    data = tasks(4).remove_columns("prompt").add_column("prompt", [prompt] * 4)
    private = card_of(tmp_path / "a", TaskSource(name="AppWorld", slug="appworld"), train_dataset=data)
    assert SECRET not in private.content
    assert "a system text of its own, which is not shown here" in private.text
    open_source = TaskSource(name="mine", slug="mine", is_publishable=True)
    assert f"You serve {SECRET}." in card_of(tmp_path / "b", open_source, train_dataset=data).text


def test_the_pocket_data_is_publishable_and_appworlds_is_not(pocket_root, tmp_path):
    pocket = task_source(check_root(pocket_root))
    assert (pocket.name, pocket.slug, pocket.is_publishable) == ("gvpo-trl's pocket data", "appworld-pocket", True)
    assert "seed 0" in pocket.description
    task = pocket_root / "data" / "tasks" / load_tasks("dev", root=pocket_root)[0]["task_id"]
    for name in ("datasets", "base_dbs", "api_docs"):
        (tmp_path / "data" / name).mkdir(parents=True)
    copy = tmp_path / "data" / "tasks" / task.name
    (copy / "ground_truth").mkdir(parents=True)
    (copy / "specs.json").write_bytes((task / "specs.json").read_bytes())
    assert not task_source(check_root(tmp_path)).is_publishable
    (tmp_path / "pocket.json").write_bytes((pocket_root / "pocket.json").read_bytes())
    assert not task_source(check_root(tmp_path)).is_publishable  # a root with other tasks in it
    (copy / "ground_truth" / "pocket.json").touch()
    assert task_source(check_root(tmp_path)).is_publishable


@pytest.mark.parametrize("prompt", ["react", "compact"])
def test_a_named_prompt_is_found_and_given_without_what_the_task_filled_in(pocket_root, prompt):
    system = load_tasks("dev", root=pocket_root, prompt=prompt)[0]["prompt"][0]["content"]
    name, template = matching_prompt(system)
    assert name == prompt
    assert template == (PROMPTS / f"{prompt}.txt").read_text().strip()
    assert matching_prompt(system + " More.") is None


def test_failing_steps_are_compared_between_start_and_end():
    history = [{"steps/failed": 0.5, "steps/failed/api": 0.5, "steps/failed/syntax": 0.0}] * 5
    history += [{"steps/failed": 0.1, "steps/failed/api": 0.1, "steps/failed/syntax": 0.0}] * 5
    titles, rows, note = failing_steps([*history, {"eval_tgc": 1.0}])
    assert titles == ["at the start", "at the end"]
    assert [name for name, _ in rows] == ["failed", "failed: api"]
    assert rows[0][1] == pytest.approx([0.5, 0.1])
    assert "first 2" in note and "of 10 logged" in note
    assert failing_steps([]) == ([], [], "")


def test_completions_may_only_go_to_the_hub_where_tasks_are_publishable():
    class Args:
        log_completions, log_completions_hub_repo, hub_benchmark = True, "me/table", None

    for source in (None, TaskSource(name="AppWorld", slug="appworld")):
        with pytest.raises(ValueError, match=r"log_completions_hub_repo='me/table' would publish .* Leave it out"):
            check_uploads(Args, MultiTurnRollout(environment(source)))
    check_uploads(Args, MultiTurnRollout(environment(TaskSource(name="x", slug="x", is_publishable=True))))


def test_no_pattern_of_uploadable_files_takes_everything():
    assert not {"*", "*.*", "*.json", "*.jsonl", "*.parquet", "*.txt", "*.pt"} & set(UPLOADABLE)
