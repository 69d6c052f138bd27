"""TRL's own tool loop under `GVPOTrainer`: the same conversations, and verdicts on the turns."""

import importlib.util
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gvpo_trl import GVPOConfig, GVPOTrainer
from gvpo_trl.failures import FailureKind as K
from gvpo_trl.faults import EnvironmentFault
from gvpo_trl.reporting.traces import read_traces
from tests.support.tool_users import BROKEN, SQL_TURNS, WORDLE_TURNS, call, fresh_model

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "tools"


def script(name: str):
    """Import a script of the recipes."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(folder, config=GRPOConfig, **changes):
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 0.0,  # so that the second batch is the same whatever the first one's advantages are
        "max_completion_length": 2000,
        "max_tool_calling_iterations": 4,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    return config(output_dir=str(folder), **(defaults | changes))


def batches_of(trainer) -> list[dict]:
    """Train, and return the batches that TRL's loop made."""
    batches, inner = [], trainer._generate_and_score_completions

    def keep(inputs):
        batches.append(inner(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = keep
    trainer.train()
    return batches


def rewards_of(trainer) -> list[dict]:
    names = ("reward", "reward_std", "tools/", "completions/", "rewards/")
    return [
        {key: value for key, value in logged.items() if key.startswith(names)} for logged in trainer.state.log_history
    ]


@pytest.mark.parametrize(("name", "turns"), [("sql_agent", SQL_TURNS), ("wordle", WORDLE_TURNS)])
def test_the_class_changes_advantages_of_failed_turns_and_nothing_else(tmp_path, name, turns):
    runs = {}
    for trainer_class in (GRPOTrainer, GVPOTrainer):
        model, tokenizer = fresh_model(turns)
        args = options(tmp_path / trainer_class.__name__)
        trainer = script(name).make_trainer(model, args, trainer_class, processing_class=tokenizer)
        runs[trainer_class] = batches_of(trainer), rewards_of(trainer)
    (plain, plain_log), (shaped, shaped_log) = runs[GRPOTrainer], runs[GVPOTrainer]
    assert plain_log == shaped_log
    traces = list(read_traces(tmp_path / "GVPOTrainer"))
    changed = 0
    for number, (grpo, gvpo) in enumerate(zip(plain, shaped, strict=True)):
        for key in ("prompt_ids", "completion_ids", "completion_mask", "tool_mask"):
            assert torch.equal(grpo[key], gvpo[key]), key
        for row, trace in enumerate(traces[number * 8 : number * 8 + 8]):
            outcome, position = grpo["advantages"][row].item(), 0
            for step in trace["steps"]:
                while not gvpo["tool_mask"][row, position]:
                    position += 1
                tokens = gvpo["advantages"][row, position : position + step["tokens"]]
                right = outcome
                if step["failure"] is not None:
                    right = -0.2 if abs(outcome) < 1e-6 else 0.0 if outcome > 0 else 1.2 * outcome
                    changed += 1
                assert tokens.tolist() == pytest.approx([right] * step["tokens"], abs=1e-5)
                position += step["tokens"]
        assert not gvpo["advantages"][gvpo["tool_mask"] == 0].any()
    assert changed > 3


CALLS = {
    "works": ([call("tell", word="a")], None),
    "raises": ([call("tell", word="raise")], K.RUNTIME),
    "takes too long": ([call("tell", word="slow")], K.TIMEOUT),
    "unknown tool": ([call("ask", word="a")], K.UNKNOWN_TOOL),
    "another argument": ([call("tell", words="a")], K.INVALID_ARGUMENTS),
    "too many arguments": ([call("tell", word="a", other=1)], K.INVALID_ARGUMENTS),
    "arguments that are no object": ([call("tell").replace("{}", "[1]")], K.INVALID_ARGUMENTS),
    "arguments that do not parse": ([BROKEN], K.INVALID_ARGUMENTS),
    "the second of two raises": ([call("tell", word="a") + "\n" + call("tell", word="raise")], K.RUNTIME),
    "the first of two raises": ([call("tell", word="raise") + "\n" + call("tell", word="a")], K.RUNTIME),
    "asynchronous": ([call("wait", word="a")], None),
    "asynchronous, raises": ([call("wait", word="raise")], K.RUNTIME),
    "asynchronous, another argument": ([call("wait", words="a")], K.INVALID_ARGUMENTS),
    "both, the asynchronous one raises": ([call("wait", word="raise") + "\n" + call("tell", word="a")], K.RUNTIME),
    "a failure as data": ([call("tell", word="data")], K.API),
    "asynchronous, a failure as data": ([call("wait", word="data")], K.API),
    "an error in the text of a result": ([call("tell", word="error: it failed")], None),
    "the machinery broke": ([call("tell", word="fault")], "fault"),
    "the machinery broke, by another class": ([call("tell", word="lost")], "fault"),
    "asynchronous, the machinery broke": ([call("wait", word="fault")], "fault"),
    "an answer": ([], None),
}


def tell(word: str) -> str:
    """Repeat a word.

    Args:
        word: The word.
    """
    errors = {"raise": ValueError, "slow": TimeoutError, "fault": EnvironmentFault, "lost": ConnectionError}
    if word in errors:
        raise errors[word](word)
    return word


async def wait(word: str) -> str:
    """Repeat a word later.

    Args:
        word: The word.
    """
    return tell(word)


class Scripted(GVPOTrainer):
    """A trainer whose rows say scripted turns in TRL's own loop."""

    scripts: list[list[str]]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        """Return the next turn of each row; a row is known by the number in its prompt."""
        texts = [self._tokenizer.decode(ids) for ids in prompt_ids]
        turns = []
        for text in texts:
            row = int(text.split("Row ")[1].split(".")[0])
            turns.append(self.scripts[row][text.rpartition(f"Row {row}.")[2].count("<|im_start|>assistant") - 1])
        end = [self._tokenizer.eos_token_id]
        ids = [self._tokenizer(turn)["input_ids"] + ([] if turn.endswith("…") else end) for turn in turns]
        return ids, [[-1.0] * len(each) for each in ids]


def play(folder, scripts, reward=None, **arguments):
    """Play scripted rows as one group, and return the trainer, its batch and its traces."""
    model, tokenizer = fresh_model(SQL_TURNS)
    changes = arguments.pop("changes", {})
    trainer = Scripted(
        model,
        reward_funcs=reward or (lambda completions, **kwargs: [float(len(each) == 1) for each in completions]),
        args=options(
            folder,
            GVPOConfig,
            num_generations=len(scripts),
            per_device_train_batch_size=len(scripts),
            **changes,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}]),
        processing_class=tokenizer,
        **({"tools": [tell, wait]} | arguments),
    )
    trainer.scripts = scripts
    trainer.model.train()
    rows = [{"prompt": [{"role": "user", "content": f"Row {n}."}]} for n in range(len(scripts))]
    batch = trainer._generate_and_score_completions(rows)
    return trainer, batch, list(read_traces(folder))


def verdict(name, arguments, result):
    return "api" if result == "data" else None


def test_verdicts_come_from_where_the_call_ran(tmp_path):
    scripts = [[*turns, "Done."] for turns, _ in CALLS.values()]
    reward = lambda completions, **kwargs: [1.0] * len(completions)  # noqa: E731
    trainer, batch, traces = play(
        tmp_path, scripts, reward, tool_verdict=verdict, tool_faults=(ConnectionError,), changes={"beta": 0.0}
    )
    assert len(traces) == len(CALLS)
    for row, ((name, (turns, kind)), trace) in enumerate(zip(CALLS.items(), traces, strict=True)):
        failures = [step["failure"] for step in trace["steps"]]
        advantages = batch["advantages"][row]
        if kind == "fault":
            assert trace["reward"] is None and trace["stop"] == "environment_lost", name
            assert not advantages.any(), name
            continue
        expected = [None] if not turns else [kind] if turns == [BROKEN] else [kind, None]
        assert failures == expected, name
        first = trace["steps"][0]["tokens"]
        assert advantages[:first].tolist() == pytest.approx([-0.2 if kind else 0.0] * first), name
        assert not advantages[first:].any(), name
    assert trainer._metrics["train"]["rollout/unscorable"] == [pytest.approx(3 / len(CALLS))]


def test_traces_hold_trls_conversation(tmp_path):
    _, _, (trace, other) = play(tmp_path, [[call("tell", word="a"), "Done."], ["Done."]])
    assert [step["text"] for step in trace["steps"]] == [call("tell", word="a"), "Done."]
    assert [step["observation"] for step in trace["steps"]] == ["a", ""]
    assert [step["api_calls"] for step in trace["steps"]] == [["tell"], []]
    assert (trace["reward"], other["reward"]) == (0.0, 1.0)
    assert trace["messages"] == [{"role": "user", "content": "Row 0."}]
    assert trace["stop"] == "completed"


def test_calls_that_did_not_run_have_no_verdict(tmp_path):
    failing = call("ask", word="a")
    _, _, traces = play(tmp_path, [[failing] * 3, ["Done."]], changes={"max_tool_calling_iterations": 2})
    assert [step["failure"] for step in traces[0]["steps"]] == ["unknown_tool", "unknown_tool", None]
    assert traces[0]["stop"] == "max_turns"


def test_a_turn_that_the_budget_cut_off_has_no_verdict(tmp_path):
    _, _, traces = play(tmp_path, [['<tool_call>\n{"name": "tell", "arg…'], ["Done."]])
    assert [step["failure"] for step in traces[0]["steps"]] == [None]
    assert traces[0]["stop"] == "max_tokens"


def test_a_result_that_does_not_fit_ends_the_trajectory_and_keeps_the_verdict(tmp_path):
    scripts = [[call("tell", word="raise"), "Done."], ["Done."]]
    _, batch, traces = play(tmp_path, scripts, changes={"max_completion_length": 80})
    assert [step["failure"] for step in traces[0]["steps"]] == ["runtime"]
    assert traces[0]["stop"] == "max_tokens"
    sampled = batch["advantages"][0][batch["tool_mask"][0] == 1]
    assert sampled.tolist() == pytest.approx([-0.2] * len(sampled))


def test_environments_by_column(tmp_path):
    class Left:
        def reset(self, **kwargs):
            """Begin."""

        def turn_left(self) -> str:
            """Turn left."""
            return "left"

    class Right:
        def reset(self, **kwargs):
            """Begin."""

        def turn_right(self) -> str:
            """Turn right."""
            raise ValueError("It is blocked.")

    model, tokenizer = fresh_model(SQL_TURNS)
    rows = [{"prompt": [{"role": "user", "content": "x"}], "environment": name} for name in ("left", "right")]
    trainer = Scripted(
        model,
        reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
        args=options(tmp_path, GVPOConfig, num_generations=2, per_device_train_batch_size=4),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory={"left": Left, "right": Right},
    )
    trainer.scripts = [[call("turn_left"), "Done."], [call("turn_right"), "Done."]] * 2
    trainer.model.train()
    prompts = [[{"role": "user", "content": f"Row {n}."}] for n in range(4)]
    names = ["left", "left", "right", "right"]
    trainer.scripts = [[call("turn_left"), "Done."], [call("turn_right"), "Done."]] * 2
    trainer._generate_and_score_completions(
        [{"prompt": prompt, "environment": name} for prompt, name in zip(prompts, names, strict=True)]
    )
    failures = [[step["failure"] for step in trace["steps"]] for trace in read_traces(tmp_path)]
    assert failures == [[None, None], ["unknown_tool", None], ["unknown_tool", None], ["runtime", None]]


def test_an_evaluation_needs_no_task_ids(tmp_path):
    model, tokenizer = fresh_model(SQL_TURNS)
    module = script("sql_agent")
    args = options(tmp_path, per_device_eval_batch_size=4)
    trainer = module.make_trainer(model, args, eval_dataset=module.tasks(), processing_class=tokenizer)
    metrics = trainer.evaluate()
    assert 0 < metrics["eval_steps/failed"] < 1
    assert "eval_tgc" not in metrics


def test_a_broken_hook_is_named(tmp_path):
    with pytest.raises(ValueError, match="tool_verdict failed for a result of 'tell': ValueError: 'bad'"):
        play(tmp_path, [[call("tell", word="a"), "Done."]] * 2, tool_verdict=lambda *call: "bad")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tools": None}, "rollout_func is missing; pass MultiTurnRollout.*or tools"),
        ({"rollout_func": print}, "pass these or rollout_func, not both"),
        ({"changes": {"failure_span": "code"}}, "with tools only 'turn' is possible"),
        (
            {"tools": None, "rollout_func": print, "tool_verdict": verdict},
            "tool_verdict and tool_faults are about tools",
        ),
    ],
)
def test_refused_at_construction(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        play(tmp_path, [["Done."]] * 2, **arguments)
