"""A run that resumes from any checkpoint is the run that was never interrupted, bit for bit."""

import json
import logging
import shutil

import pandas
import pytest
import torch
from transformers import TrainerCallback

from gvpo_trl import MultiTurnRollout
from gvpo_trl.training.resume import FOLDER, last_checkpoint
from tests.support.interrupted import CASES, differences, log, train
from tests.support.toy import ToyEnvironment
from tests.support.training import score_of, tasks

STEPS = range(1, 10)


def checkpoint(folder, step):
    return folder / f"checkpoint-{step}"


@pytest.fixture
def warned(caplog):
    """Return the warnings of the module that resumes."""
    caplog.set_level(logging.WARNING, "gvpo_trl.training.resume")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "gvpo_trl.training.resume"]


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_resumes_as_the_same_run(case, tmp_path, warned):
    """Four tasks fill 8 or fewer steps, so the run reaches its second epoch, and a log shows three steps."""
    whole = train(tmp_path, **CASES[case])
    assert len({entry["loss"] for entry in log(whole) if "loss" in entry}) == 3, "the run moves"
    found = {step: differences(whole, train(tmp_path, checkpoint(tmp_path, step), **CASES[case])) for step in STEPS}
    assert found == {step: [] for step in STEPS}
    assert warned() == []


@pytest.mark.parametrize("case", ["buffer", "iterations", "boundaries"])
def test_a_stream_resumes_as_the_same_run_also_after_it_began_anew(case, tmp_path):
    options = {"train_dataset": tasks(4).to_iterable_dataset(), **CASES[case]}
    whole = train(tmp_path, **options)
    assert max(entry["epoch"] for entry in whole.state.log_history) > 1
    found = {step: differences(whole, train(tmp_path, checkpoint(tmp_path, step), **options)) for step in STEPS}
    assert found == {step: [] for step in STEPS}


def test_a_stream_that_trains_on_for_longer_goes_on_where_it_stood(tmp_path):
    """The shorter run ends in the middle of the stream. transformers calls that the end of an epoch."""
    options = {"train_dataset": tasks(8).to_iterable_dataset(), "lr_scheduler_type": "constant", **CASES["buffer"]}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "parts", max_steps=6, **options)
    resumed = train(tmp_path / "parts", checkpoint(tmp_path / "parts", 6), **options)
    assert [each for each in differences(whole, resumed) if each != "log"] == []


def test_evaluations_in_between_change_nothing(tmp_path):
    options = {"eval_dataset": tasks(4), "eval_strategy": "steps", "eval_steps": 2, **CASES["iterations"]}
    whole = train(tmp_path, **options)
    assert sum("eval_reward" in entry for entry in whole.state.log_history) == 5
    for step in (1, 2, 3, 6):
        assert differences(whole, train(tmp_path, checkpoint(tmp_path, step), **options)) == []


def test_a_resumed_run_shows_the_completions_of_its_batch(tmp_path):
    options = {"log_completions": True, "logging_steps": 1, "max_steps": 3, **CASES["buffer"]}
    tables = tmp_path / "completions"
    train(tmp_path, **options)
    before = pandas.read_parquet(tables / "completions_00003.parquet")
    shutil.rmtree(tables)
    train(tmp_path, checkpoint(tmp_path, 2), **options)
    pandas.testing.assert_frame_equal(pandas.read_parquet(tables / "completions_00003.parquet"), before)
    assert len(before) == 8


def test_the_mean_loss_of_a_resumed_call_is_that_of_its_own_steps(tmp_path):
    options = {"max_steps": 4, **CASES["buffer"]}
    train(tmp_path, logging_steps=1, **options)
    resumed = train(tmp_path, checkpoint(tmp_path, 2), **options)
    losses = train(tmp_path, checkpoint(tmp_path, 2), **(options | {"logging_steps": 1})).state.log_history
    own = [entry["loss"] for entry in losses if "loss" in entry and entry["step"] > 2]
    assert resumed.state.log_history[-1]["train_loss"] == pytest.approx(sum(own) / 2)


def test_the_worlds_of_the_next_batch_are_asked_for_as_before(tmp_path):
    class Asked(ToyEnvironment):
        def prefetch(self, task_ids):
            self.__dict__.setdefault("asked", []).append(task_ids)

    def asked(resume=None):
        environment = Asked(score=score_of)
        rollout = MultiTurnRollout(environment)
        train(tmp_path, resume, rollout_func=rollout, **CASES["buffer"], max_steps=8)
        return environment.asked, [episode.reset.task_id for episode in environment.opened]

    first, opened = asked()
    again, reopened = asked(checkpoint(tmp_path, 2))
    assert again == first == [opened[8:]]
    assert reopened == opened[8:], "the trajectories of the buffer are not rolled out again"


# What is on disk


def test_files_go_with_their_checkpoint_and_are_small_at_a_boundary(tmp_path):
    train(tmp_path, max_steps=6, save_total_limit=4, **CASES["buffer"])
    names = {f"checkpoint-{step}" for step in (3, 4, 5, 6)}
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == names
    sizes = {n: (tmp_path / FOLDER / f"checkpoint-{n}" / "rank0.pt").stat().st_size for n in (4, 5, 6)}
    assert sizes[4] < 10_000
    assert sizes[4] < sizes[6] < sizes[5], "micro-batches that are used up are left out"


def test_the_size_is_what_the_module_says(tmp_path):
    whole = train(tmp_path, max_steps=2, max_turn_length=400, max_turns=1, **CASES["iterations"])
    path = tmp_path / FOLDER / "checkpoint-1" / "rank0.pt"
    batches = torch.load(path, weights_only=True)["buffer"]
    prompts, completions = (
        sum(batch[f"{name}_ids"].numel() for batch in batches) for name in ("prompt", "completion")
    )
    assert whole.loss_inputs[0].keys() >= {"advantages", "old_per_token_logps", "tool_mask"}
    assert path.stat().st_size < 16 * prompts + 32 * completions + 40_000


def test_nothing_is_executed_when_a_file_is_read(tmp_path, warned):
    class Harmful:
        def __reduce__(self):
            return (tmp_path.joinpath("harm").mkdir, ())

    train(tmp_path, max_steps=1, **CASES["buffer"])
    torch.save({"schema": Harmful()}, tmp_path / FOLDER / "checkpoint-1" / "rank0.pt")
    train(tmp_path, checkpoint(tmp_path, 1), max_steps=2, **CASES["buffer"])
    assert not (tmp_path / "harm").exists()
    assert "cannot be read" in warned()[0]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints", "every_save"])
def test_the_hub_gets_nothing_of_the_buffer(strategy, tmp_path, monkeypatch):
    """Only the Hub's client is replaced. It notes which files of the run it would upload."""
    uploads = set()

    class Done:
        def is_done(self):
            return True

        done = is_done

    class Client:
        def create_repo(self, name, **options):
            return type("Repository", (), {"repo_id": name})

        def upload_folder(self, *, folder_path, ignore_patterns=None, allow_patterns=None, **options):
            from pathlib import Path

            from huggingface_hub.utils import filter_repo_objects

            files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
            uploads.update(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
            return Done()

    monkeypatch.setattr("transformers.trainer.hf_api", Client)
    options = {"push_to_hub": True, "hub_model_id": "someone/agent", "hub_strategy": strategy}
    train(tmp_path, max_steps=2, **options, **CASES["buffer"])
    assert (tmp_path / FOLDER / "checkpoint-1" / "rank0.pt").is_file()
    assert "model.safetensors" in uploads
    assert not [name for name in uploads if "rank0" in name or FOLDER in name]


# What is not there


class Kill(TrainerCallback):
    """Ends the run as a kill in the middle of a save would: while the second checkpoint's model is written."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.save_pretrained = self.fail

    def fail(self, folder, **options):
        from pathlib import Path

        Path(folder).mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt


def test_a_kill_during_a_save_leaves_the_older_checkpoint(tmp_path):
    whole = train(tmp_path / "whole", max_steps=4, **CASES["buffer"])
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        train(folder, max_steps=4, callbacks=[Kill()], **CASES["buffer"])
    assert checkpoint(folder, 2).is_dir()
    assert last_checkpoint(folder) == str(checkpoint(folder, 1))
    assert differences(whole, train(folder, True, max_steps=4, **CASES["buffer"])) == []


def test_a_cut_off_state_is_no_checkpoint(tmp_path):
    train(tmp_path, max_steps=2)
    state = checkpoint(tmp_path, 2) / "trainer_state.json"
    state.write_text(state.read_text()[:-20])
    assert last_checkpoint(tmp_path) == str(checkpoint(tmp_path, 1))
    assert last_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("before", "after", "reason", "multiple"),
    [
        ({"save_only_model": True}, {}, "save_only_model=True writes none", 4),
        ({}, {"num_iterations": 3}, "num_iterations was 1 and is 3", 12),
        ({}, {"gradient_accumulation_steps": 8}, "gradient_accumulation_steps was 1 and is 8", 1),
    ],
)
def test_a_checkpoint_without_its_buffer_names_the_good_multiples(before, after, reason, multiple, tmp_path, warned):
    case = CASES["buffer"]
    train(tmp_path, max_steps=3, **before, **case)
    resumed = train(tmp_path, checkpoint(tmp_path, 3), max_steps=4, **(case | after))
    assert resumed.state.global_step == 4
    if multiple == 1:  # every step ends with a generation batch, so nothing is missing
        assert warned() == []
        return
    (warning,) = warned()
    assert reason in warning
    assert f"multiples of {multiple} steps" in warning


def test_the_rest_of_a_batch_without_its_buffer_is_generated_anew(tmp_path, warned):

    def prompts(batches):
        return sorted(row for batch in batches for row in batch["prompt_ids"].tolist())

    whole = train(tmp_path, max_steps=8, **CASES["buffer"])
    shutil.rmtree(tmp_path / FOLDER)
    resumed = train(tmp_path, checkpoint(tmp_path, 3), max_steps=8, **CASES["buffer"])
    assert "The remaining 1 of 4 micro-batches" in warned()[0]
    assert len(resumed.loss_inputs) == 5
    assert prompts(resumed.loss_inputs[1:]) == prompts(whole.loss_inputs[4:]), "the next batch has the next tasks"
    at_boundary = train(tmp_path, checkpoint(tmp_path, 4), max_steps=8, logging_steps=1, **CASES["buffer"])
    assert len(warned()) == 1, "a checkpoint at a boundary needs nothing"
    assert torch.equal(at_boundary.loss_inputs[0]["completion_ids"], resumed.loss_inputs[1]["completion_ids"])


def test_files_of_an_overwritten_checkpoint_do_not_stay(tmp_path):
    train(tmp_path, max_steps=1, **CASES["buffer"])
    train(tmp_path, max_steps=1, save_only_model=True, **CASES["buffer"])
    assert not (tmp_path / FOLDER / "checkpoint-1").exists()


def test_a_second_call_of_train_begins_a_new_batch(tmp_path):
    """The first call ends in the middle of a buffer, which belongs to other weights."""
    trainer = train(tmp_path, max_steps=3, **CASES["buffer"])
    trainer.train()
    traces = [json.loads(line) for line in (tmp_path / "_trajectories" / "rank0.jsonl").open()]
    assert len(traces) == 16
