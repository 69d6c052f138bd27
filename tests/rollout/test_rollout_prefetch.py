"""`Prefetch`: which tasks the environment is asked to open and when, with any kind of data loader."""

import pickle

import pytest

from gvpo_trl import MultiTurnRollout
from gvpo_trl.rollout.prefetch import Lookahead, Prefetch
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy import ToyEnvironment
from tests.support.training import code, finish, make_trainer, tasks


def rows(name):
    return [{"task_id": f"{name}{row}"} for row in range(2)]


def ids(name):
    return [row["task_id"] for row in rows(name)]


class Recording(ToyEnvironment):
    """Records each opened task as a string, and each request to open tasks ahead as a tuple."""

    def __init__(self, **options):
        super().__init__(**options)
        self.events = []

    def open(self, task_id):
        self.events.append(task_id)
        return super().open(task_id)

    def prefetch(self, task_ids):
        self.events.append(tuple(task_ids))

    @property
    def asked(self):
        return [list(event) for event in self.events if isinstance(event, tuple)]

    @property
    def opened_tasks(self):
        return [event for event in self.events if isinstance(event, str)]


def test_an_element_can_be_looked_at_before_it_is_taken():
    ahead = Lookahead(iter("abc"))
    assert next(ahead) == "a"
    assert (ahead.peek(), ahead.peek(), next(ahead), next(ahead)) == (["b"], ["b"], "b", "c")
    assert ahead.peek() == []
    with pytest.raises(StopIteration):
        next(ahead)


def test_the_batch_after_this_one_is_asked_for_when_this_one_is_rolled_out():
    environment = Recording()
    prefetch = Prefetch(environment)
    prefetch.expect([rows("a"), rows("b")])
    assert environment.asked == [], "all places belong to the first batch"
    prefetch.rolled_out(ids("a"))
    assert environment.asked == [ids("b")]
    prefetch.expect([rows("b"), rows("c")])
    prefetch.rolled_out(ids("b"))
    assert environment.asked == [ids("b"), ids("c")]
    prefetch.expect([rows("c")])
    prefetch.rolled_out(ids("c"))
    assert environment.asked == [ids("b"), ids("c")], "nothing comes after the last batch"


def test_several_generations_in_one_optimizer_step():
    environment = Recording()
    prefetch = Prefetch(environment)
    prefetch.expect([rows("a"), rows("b"), rows("c")])
    prefetch.rolled_out(ids("a"))
    prefetch.rolled_out(ids("b"))
    assert environment.asked == [ids("b"), ids("c")]


def test_trajectories_that_are_trained_on_for_several_steps_are_rolled_out_once():
    environment = Recording()
    prefetch = Prefetch(environment)
    prefetch.expect([rows("a"), rows("a"), rows("a")])
    prefetch.rolled_out(ids("a"))
    assert environment.asked == [], "the next batch is not known yet"
    prefetch.expect([rows("a"), rows("a"), rows("b")])
    assert environment.asked == [ids("b")], "no rollout comes before the next batch"


def test_rows_without_tasks_and_environments_without_prefetch_are_left_alone():
    prefetch = Prefetch(ToyEnvironment())
    prefetch.expect([rows("a"), rows("b")])
    prefetch.rolled_out(ids("a"))
    environment = Recording()
    prefetch = Prefetch(environment)
    prefetch.expect([rows("a"), [{"prompt": []}]])
    prefetch.rolled_out(ids("a"))
    assert environment.asked == []


def test_an_attribute_that_is_no_method_is_not_called():
    environment = ToyEnvironment()
    environment.prefetch = 4
    prefetch = Prefetch(environment)
    prefetch.expect([rows("a"), rows("b")])
    prefetch.rolled_out(ids("a"))


def trained(folder, **options):
    """Train for four steps, with turns that the model itself samples, and return the environment."""
    environment = Recording()
    trainer = make_trainer(
        folder,
        model=tiny_model(tiny_tokenizer()),
        rollout_func=MultiTurnRollout(environment),
        max_turns=1,
        max_turn_length=4,
        **({"max_steps": 4} | options),
    )
    pickle.dumps(trainer.data_collator)
    trainer.train()
    return trainer, environment


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_loader_processes_gives_the_same_run(tmp_path, workers):
    trainer, environment = trained(tmp_path / "plain")
    ours, others = trained(tmp_path / "workers", dataloader_num_workers=workers)
    assert others.events == environment.events
    assert [task for batch in environment.asked for task in batch] == environment.opened_tasks[4:]
    plain, other = ([p.detach() for p in each.model.parameters()] for each in (trainer, ours))
    assert all((one == two).all() for one, two in zip(plain, other, strict=True))


def test_worlds_of_the_next_batch_are_asked_for_before_the_step_on_this_one(tmp_path):
    _, environment = trained(tmp_path, max_steps=3)
    assert len(environment.opened_tasks) == 12, "the run has three batches of four"
    first = environment.events.index(tuple(environment.opened_tasks[4:8]))
    assert first == 4, "the second batch is asked for when the first is rolled out, before the step"


def test_streaming_data(tmp_path):
    stream = tasks(4).to_iterable_dataset()
    _, environment = trained(tmp_path, train_dataset=stream, max_steps=3)
    assert [task for batch in environment.asked for task in batch] == environment.opened_tasks[4:]


def test_batches_that_a_resume_skips_are_not_asked_for(tmp_path):
    _, whole = trained(tmp_path / "whole", max_steps=4)
    trained(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=2)
    environment = Recording()
    trainer = make_trainer(
        tmp_path / "run",
        model=tiny_model(tiny_tokenizer()),
        rollout_func=MultiTurnRollout(environment),
        max_turns=1,
        max_turn_length=4,
        max_steps=4,
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert environment.opened_tasks == whole.opened_tasks[8:]
    assert environment.asked == whole.asked[2:]


def test_an_evaluation_asks_for_nothing(tmp_path):
    environment = Recording()
    trainer = make_trainer(
        tmp_path, [[code("1"), finish(1, 1)]], rollout_func=MultiTurnRollout(environment), num_generations_eval=1
    )
    trainer.evaluate(tasks(4))
    assert environment.asked == []
