"""The console gets one readable line a generation; the metrics stay where they are."""

import logging
import re
import subprocess
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pandas
import pytest
from transformers import PrinterCallback, ProgressCallback
from transformers.utils.notebook import NotebookProgressCallback

from gvpo_trl.reporting.console import ConsoleLines, line, notebook_lines
from gvpo_trl.training.quiet import NAMED, quieten
from tests.support.training import FAIL, LOST, code, finish, make_trainer, tasks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [[code("print('hello')"), FAIL, finish(1, 1)], [finish(2, 0)], [finish(0, 2)], [finish(1, 1)]]


def lines_of(text):
    return [each for each in text.splitlines() if each.startswith("step ")]


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_generation_is_one_line(tmp_path, capsys, disable_tqdm):
    trainer = make_trainer(tmp_path, SCRIPT, max_steps=2, disable_tqdm=disable_tqdm)
    trainer.train()
    printed = capsys.readouterr()
    lines = lines_of(printed.out)
    assert [each.split("  ")[0] for each in lines] == ["step 1/2", "step 2/2"]
    for words in ("reward 0.500", "TGC 25.0 %", "failed steps 17 %", "1.5 turns", "tokens"):
        assert words in lines[0]
    assert "{'loss'" not in printed.out
    assert len(trainer.state.log_history[0]) > 40, "every metric stays in the history"


def test_steps_without_a_generation_write_no_line(tmp_path, capsys):
    make_trainer(tmp_path, SCRIPT, max_steps=2, num_iterations=2).train()
    assert len(lines_of(capsys.readouterr().out)) == 1


def test_the_dictionary_of_metrics_can_be_had_again(tmp_path, capsys):
    trainer = make_trainer(tmp_path, SCRIPT)
    trainer.remove_callback(ConsoleLines)
    trainer.add_callback(PrinterCallback)
    trainer.train()
    printed = capsys.readouterr().out
    assert "'reward'" in printed and not lines_of(printed)


def test_a_users_own_callback_stays(tmp_path):
    class Mine(ProgressCallback):
        pass

    trainer = make_trainer(tmp_path, SCRIPT, callbacks=[Mine])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert Mine in kinds
    assert PrinterCallback not in kinds


def test_shares_of_trouble_are_named_only_where_there_are_any():
    logs = {"reward": 0.5, "stop/max_tokens": 0.81, "rollout/unscorable": 0.0}
    assert line(logs, 3, 9) == "step 3/9  reward 0.500 · out of tokens 81 %"
    assert line({"eval_dev_reward": 1.0}, 3, 0) == "step 3  eval_dev: reward 1.000"
    assert line({"loss": 0.1, "learning_rate": 1e-5}, 3, 9) is None
    assert line({"x\x1b[2J": 0.12345}, 3, 9) == "x\\x1b[2J 0.1235"


def test_a_notebooks_table_has_the_columns_of_a_line(tmp_path):
    class Tracker:
        def __init__(self):
            self.rows, self.inner_table = [], None

        def write_line(self, values):
            self.rows.append(values)

    callback = notebook_lines(NotebookProgressCallback)()
    callback.training_tracker = Tracker()
    trainer = make_trainer(tmp_path, SCRIPT)
    trainer.train()
    callback.on_log(trainer.args, trainer.state, trainer.control, logs=trainer.state.log_history[0])
    (row,) = callback.training_tracker.rows
    assert row["Step"] == "1" and row["reward"] == "0.500"
    assert len(row) < 12


def test_an_evaluation_outside_of_training_is_a_table_of_a_notebook(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda html, display_id=None: shown.append(html.data))
    trainer = make_trainer(tmp_path, SCRIPT)
    trainer.remove_callback(ConsoleLines)
    trainer.add_callback(notebook_lines(NotebookProgressCallback))
    trainer.evaluate(tasks(1))
    table = shown[-1]
    assert re.findall("<th>(.*)</th>", table)[:4] == ["Step", "reward", "TGC", "SGC"]
    assert "<td>0.500</td>" in table and "<td>25.0 %</td>" in table


def test_nothing_that_a_user_cannot_act_on_is_warned_of(tmp_path):
    """This runs in a process of its own, because a warning is shown only once and pytest has filters of its own."""
    program = """
import sys
from pathlib import Path
from tests.reporting.test_console import SCRIPT
from tests.support.training import make_trainer
trainer = make_trainer(Path(sys.argv[1]), {script}, gradient_checkpointing=True, **{options})
trainer.train()
"""
    for script, options in (("SCRIPT", {}), ("None", {"max_turns": 1, "max_turn_length": 9})):
        text = program.format(script=script, options=options)
        done = subprocess.run(
            [sys.executable, "-c", text, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert not re.search("Warning|experimental|deprecated|friendly reminder", done.stderr), done.stderr


def test_a_users_own_filter_shows_a_quiet_warning_again():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        quieten()
        warnings.warn("You are using 'rollout_func', which is an experimental feature", UserWarning, stacklevel=1)
    assert len(caught) == 1


def test_a_reminder_about_padding_is_quiet_and_other_messages_are_not():
    quieten()
    library = logging.getLogger("transformers.generation.stopping_criteria")
    handler = logging.Handler()
    seen = []
    handler.emit = lambda record: seen.append(record.getMessage())
    library.addHandler(handler)
    try:
        library.warning("This is a friendly reminder - the current text generation call has exceeded …")
        library.warning("something else")
    finally:
        library.removeHandler(handler)
    assert seen == ["something else"]


def test_an_unscorable_row_is_two_lines(tmp_path, caplog):
    make_trainer(tmp_path, [[LOST], *SCRIPT[1:]]).train()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all("\n" not in each and len(each) < 400 for each in told)
    (rows,) = [each for each in told if "no reward" in each]
    assert re.match(r"1 of 4 rows have no reward and are left out: row 0 \(task t\d_\d\); full report in ", rows)
    assert sum("evaluator crashed" in each for each in told) == 2, "one line for each attempt"


def test_many_unscorable_rows_are_one_line(tmp_path, caplog):
    make_trainer(tmp_path, [[LOST]], per_device_train_batch_size=8).train()
    (rows,) = [record.getMessage() for record in caplog.records if "no reward" in record.getMessage()]
    assert rows.count("task t") == NAMED and f"and {8 - NAMED} more" in rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_context_length": 120},
            r"prompt of task t0_1 has \d+ tokens of a context of 120, which leaves",
        ),
        ({"max_completion_length": 60}, "max_completion_length=60 leaves 60 tokens for all turns"),
    ],
)
def test_a_prompt_without_room_for_a_turn_is_a_warning_before_training(tmp_path, options, words):
    trainer = make_trainer(tmp_path, SCRIPT, **options)
    with pytest.warns(UserWarning, match=words):
        trainer.train()
    with pytest.warns(UserWarning, match=words):
        trainer.evaluate(tasks(1))


def test_a_prompt_with_room_causes_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*leaves.*tokens for all turns")
        make_trainer(tmp_path, SCRIPT).train()


def test_tables_hold_the_shaped_advantage_and_the_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    trainer = make_trainer(tmp_path, SCRIPT, log_completions=True, max_steps=2, eval_dataset=tasks(1))
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    tokens = [len(turn) + 1 for turn in (code("print('hello')"), FAIL, finish(1, 1))]
    assert table["turns"].tolist() == [3, 1, 1, 1]
    assert table["failed_steps"].tolist() == [1, 0, 0, 0]
    assert table["stop"].tolist() == ["completed"] * 4
    # The first row ties, so its failed step has the advantage −0.2 and its other tokens 0.
    assert table["failed_advantage"].tolist()[0] == pytest.approx(-0.2)
    assert table["failed_advantage"].isna().tolist() == [False, True, True, True]
    first = -0.2 * tokens[1] / sum(tokens)
    assert table["advantage"].tolist() == pytest.approx([first, 0.5, -0.5, 0.0], abs=1e-5)
    printed = capsys.readouterr().out
    assert "1 failed" in printed and "3 turns" in printed
    assert len(re.findall(r"─ Step \d ─", printed)) == 2, "the summary of the training repeats no table"
    trainer.evaluate()
    evaluated = pandas.read_parquet(tmp_path / "completions" / "completions_00002_eval.parquet")
    trained = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(evaluated) == len(trained) == 4, "an evaluation replaces no table of the training"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_the_same_table(tmp_path, monkeypatch, name):
    sent = []
    stand_in = ModuleType(name)
    stand_in.__spec__ = ModuleSpec(name, None)
    stand_in.run, stand_in.Table = object(), lambda dataframe: dataframe
    stand_in.log = lambda figures, step=None: sent.append(figures)
    monkeypatch.setitem(sys.modules, name, stand_in)
    for module in ("trl.trainer.grpo_trainer", "trl.extras.profiling"):
        monkeypatch.setattr(f"{module}.{name}", stand_in, raising=False)
    trainer = make_trainer(tmp_path, SCRIPT, log_completions=True)
    trainer.args.report_to = [name]
    trainer.train()
    table = next(each["completions"] for each in sent if "completions" in each)
    assert table["failed_steps"].tolist() == [1, 0, 0, 0]
    assert table["advantage"][1] == pytest.approx(0.5)
