"""Names of an evaluation's metrics, and the results of a prediction."""

import pytest

from tests.support.training import FAIL, LOST, finish, make_trainer, tasks

GOOD, BAD = [[finish(1, 0)]], [[FAIL, finish(0, 1)]]


def by_task(number, row):
    """Solve the tasks of the first scenario, and fail at the others."""
    return GOOD[0] if row["task_id"].startswith("t0") else BAD[0]


def test_every_metric_carries_the_name_of_its_data_set(tmp_path):
    sets = {"dev": tasks(2), "test": tasks(5).select([3, 4])}
    trainer = make_trainer(
        tmp_path,
        by_task,
        eval_dataset=sets,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_dev_reward",
        greater_is_better=True,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if any(name.startswith("eval_") for name in entry)]
    dev, test = logged[0], logged[1]
    for name, values in (("dev", dev), ("test", test)):
        bare = {key for key in values if key not in ("step", "epoch") and not key.startswith(f"eval_{name}_")}
        assert bare == set()
    assert (dev["eval_dev_reward"], test["eval_test_reward"]) == (1.0, 0.0)
    assert (dev["eval_dev_tgc"], test["eval_test_tgc"]) == (100.0, 0.0)
    assert (dev["eval_dev_steps/failed"], test["eval_test_steps/failed"]) == (0.0, 0.5)
    assert trainer.state.best_metric == 1.0


def test_a_prefix_of_ones_own_mixes_nothing(tmp_path):
    trainer = make_trainer(tmp_path, by_task, eval_dataset=tasks(2))
    trainer.train()
    first = trainer.evaluate(tasks(5).select([3, 4]), metric_key_prefix="test")
    second = trainer.evaluate()
    assert {name for name in first if not name.startswith("test_")} <= {"epoch"}
    assert {name for name in second if not name.startswith("eval_")} <= {"epoch"}
    assert (first["test_reward"], second["eval_reward"]) == (0.0, 1.0)
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("eval_test")]


def test_predictions_stand_in_the_order_of_the_data_set(tmp_path):
    """The evaluation shuffles its rows and fills its last batch; two of these rows have the same task."""
    rows = tasks(7).select([6, 0, 3, 3, 1, 5, 2])
    trainer = make_trainer(tmp_path, by_task, num_generations_eval=1, per_device_eval_batch_size=4)
    output = trainer.predict(rows)
    assert output.label_ids.tolist() == rows["task_id"]
    assert [attempt["task_id"] for attempt in output.predictions[:, 0]] == rows["task_id"]
    stream = trainer.predict(rows.to_iterable_dataset())
    assert [attempt["task_id"] for attempt in stream.predictions[:, 0]] == rows["task_id"]
    assert trainer.evaluate(rows)["eval_reward"] is not None, "a prediction leaves nothing behind for an evaluation"


def test_a_prediction_returns_a_result_for_each_attempt(tmp_path):
    def script(number, row):
        return {"t0_1": [finish(1, 0)], "t0_2": [FAIL, finish(1, 1)], "t0_3": [LOST]}[row["task_id"]]

    trainer = make_trainer(tmp_path, script)
    output = trainer.predict(tasks(3), metric_key_prefix="test")
    assert output.label_ids.tolist() == ["t0_1", "t0_2", "t0_3"]
    assert output.predictions.shape == (3, 4)
    first, second, third = output.predictions[:, 0]
    assert (first["reward"], first["success"], first["failed_steps"], first["turns"]) == (1.0, True, 0, 1)
    assert (second["reward"], second["success"], second["failed_steps"], second["stop"]) == (
        0.5,
        False,
        1,
        "completed",
    )
    assert (third["reward"], third["success"], third["stop"]) == (None, None, "environment_lost")
    assert "evaluator crashed" in third["fault"]
    assert first["completion"] == [{"role": "assistant", "content": finish(1, 0)}]
    assert second["rewards"] == {"passed_tests_share": 0.5}
    assert output.metrics["test_reward"] == pytest.approx(0.75)
    assert output.metrics["test_tgc"] == 50.0
