"""`MultiTurnRollout`: its arguments, its budgets, and the rows that it returns to TRL."""

from contextlib import contextmanager
from dataclasses import asdict

import pytest

from gvpo_trl import GVPOConfig, MultiTurnRollout
from gvpo_trl.faults import EpisodeFault
from gvpo_trl.rollout.seam import RolloutContext
from gvpo_trl.rollout.streams import Streams
from gvpo_trl.rollout.types import StopReason, Turn
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import Scripted, ToyEnvironment

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
DONE = "```python\nok = 1\ndone()\n```"
FAILING = "```python\n1 / 0\n```"


def context(**changes):
    values = {
        "rows": [],
        "is_training": True,
        "tokenizer": TOKENIZER,
        "end_ids": [END],
        "chat_template": None,
        "chat_template_kwargs": {},
        "max_turns": 40,
        "max_turn_length": 1500,
        "max_observation_length": 3000,
        "max_completion_length": 9000,
        "max_context_length": None,
        "no_code_is_failure": True,
        "failure_span": "turn",
        "mask_truncated_completions": False,
        "streams": lambda: Streams((0,)),
        "generation_session": None,
        "record": None,
    }
    return RolloutContext(**(values | changes))


class Caller:
    """Stands in for the trainer: provides the context of a rollout without a model."""

    def __init__(self, folder, scripts, *, task_ids=None, logprobs=False, **config):
        self.args = GVPOConfig(str(folder), report_to="none", use_cpu=True, bf16=False, **config)
        self.task_rows = task_ids or [{"task_id": f"task_{row}"} for row in range(len(scripts))]
        self.script = Scripted(TOKENIZER, dict(enumerate(scripts)))
        self.logprobs, self.recorded, self.sessions = logprobs, [], 0
        self.prompts = [[{"role": "user", "content": "Go."}] for _ in self.task_rows]

    def rollout_context(self):
        return context(
            rows=self.task_rows,
            failure_span=self.args.failure_span,
            mask_truncated_completions=self.args.mask_truncated_completions,
            generation_session=self.generation_session,
            record=lambda trajectories, seconds, in_metrics: self.recorded.append((trajectories, seconds)),
        )

    @contextmanager
    def generation_session(self, end_ids):
        self.sessions += 1
        yield lambda requests: [
            Turn(ids=turn.ids, logprobs=[-1.0] * len(turn.ids) if self.logprobs else None)
            for turn in self.script(requests)
        ]

    def rows(self, environment=None, **kwargs):
        return MultiTurnRollout(environment or ToyEnvironment(), **kwargs)(self.prompts, self)


@pytest.mark.parametrize("name", ["max_turns", "max_turn_length", "max_observation_length"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_budget_below_one_is_an_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be at least 1"):
        MultiTurnRollout(ToyEnvironment(), **{name: value})


def test_a_template_without_its_place_is_an_error():
    with pytest.raises(ValueError, match=r"observation_template='Output:' must hold \{observation\}"):
        MultiTurnRollout(ToyEnvironment(), observation_template="Output:")


def test_a_negative_wait_is_an_error():
    with pytest.raises(ValueError, match=r"straggler_s=-1 must be >= 0"):
        MultiTurnRollout(ToyEnvironment(), straggler_s=-1)


def test_budgets_come_from_the_configuration():
    budgets = MultiTurnRollout(ToyEnvironment()).budgets(context(no_code_is_failure=False, max_context_length=4096))
    assert (budgets.max_turns, budgets.max_turn_length, budgets.max_observation_length) == (40, 1500, 3000)
    assert (budgets.max_completion_length, budgets.max_context_length) == (9000, 4096)
    assert not budgets.no_code_is_failure


def test_a_budget_given_to_the_callback_goes_before_the_configurations():
    rollout = MultiTurnRollout(ToyEnvironment(), max_turns=3, max_observation_length=70, straggler_s=7.0)
    budgets = rollout.budgets(context())
    assert (budgets.max_turns, budgets.max_turn_length, budgets.max_observation_length) == (3, 1500, 70)
    assert (budgets.max_context_length, budgets.straggler_s) == (None, 7.0)


def test_rows_have_one_element_per_prompt_in_every_field(tmp_path):
    caller = Caller(tmp_path, [[FAILING, DONE], [DONE], ["Hm."]])
    rows = caller.rows(max_turns=2)
    assert rows.pop("logprobs") is None
    assert {name: len(values) for name, values in rows.items()} == dict.fromkeys(rows, 3)
    assert all(isinstance(values, list) for values in rows.values())
    assert rows["turns"] == [2, 1, 2]
    assert rows["failed_steps"] == [1, 0, 2]
    assert rows["passed_tests"] == [["called"], ["called"], []]
    assert rows["failed_tests"] == [["other"], ["other"], ["other"]]
    assert [trajectory.task_id for trajectory in rows["trajectory"]] == ["task_0", "task_1", "task_2"]
    assert [len(ids) for ids in rows["completion_ids"]] == [len(mask) for mask in rows["env_mask"]]
    assert [len(ids) for ids in rows["completion_ids"]] == [len(mask) for mask in rows["failed_mask"]]
    assert [sum(mask) for mask in rows["failed_mask"]] == [len(FAILING) + 1, 0, 2 * (len("Hm.") + 1)]


def test_a_rollout_is_recorded_once(tmp_path):
    caller = Caller(tmp_path, [[FAILING, DONE]])
    rows = caller.rows()
    ((trajectories, seconds),) = caller.recorded
    assert trajectories == rows["trajectory"]
    assert all(value >= 0 for value in asdict(seconds).values())
    assert caller.sessions == 1


def test_logprobs_when_every_turn_has_them(tmp_path):
    rows = Caller(tmp_path, [[FAILING, DONE], [DONE]], logprobs=True).rows()
    assert rows["logprobs"] == [[-float(mask) for mask in masks] for masks in rows["env_mask"]]


def test_the_span_of_a_failed_step_is_the_configurations(tmp_path):
    rows = Caller(tmp_path, [[FAILING, DONE]], failure_span="code").rows()
    failed = [i for i, mark in zip(rows["completion_ids"][0], rows["failed_mask"][0], strict=True) if mark]
    assert TOKENIZER.decode(failed) == "1 / 0"


def test_a_truncated_row_leaves_the_loss_when_asked(tmp_path):
    scripts = [[FAILING], [DONE]]
    masked = Caller(tmp_path, scripts, mask_truncated_completions=True).rows(max_turns=2)
    kept = Caller(tmp_path, scripts).rows(max_turns=2)
    assert [t.stop for t in masked["trajectory"]] == [StopReason.MAX_TURNS, StopReason.COMPLETED]
    assert masked["completion_ids"] == kept["completion_ids"]
    assert [any(mask) for mask in masked["env_mask"]] == [False, True]
    assert [any(mask) for mask in masked["failed_mask"]] == [False, False]
    assert [any(mask) for mask in kept["env_mask"]] == [True, True]


def test_a_lost_environment_is_an_unscorable_row_with_a_filler(tmp_path):
    def faults(number, place):
        raise EpisodeFault("gone")

    rows = Caller(tmp_path, [[DONE], [DONE]], logprobs=True).rows(ToyEnvironment(faults=faults))
    assert rows["passed_tests"] == rows["failed_tests"] == [None, None]
    assert rows["completion_ids"] == [[END], [END]]
    assert rows["env_mask"] == rows["failed_mask"] == [[0], [0]]
    assert rows["logprobs"] == [[0.0], [0.0]]
    assert rows["turns"] == rows["failed_steps"] == [0, 0]


def test_a_row_without_task_id_is_an_error_that_names_the_remedy(tmp_path):
    caller = Caller(tmp_path, [[DONE], [DONE]], task_ids=[{"task_id": "a"}, {}])
    with pytest.raises(ValueError, match=r"no column 'task_id'.*load_tasks"):
        caller.rows()
