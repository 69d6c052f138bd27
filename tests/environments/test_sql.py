"""The SQL environment: solvable tasks, unguessable answers, split words and shapes, verdicts in worker processes."""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gvpo_trl.environments.checks import Snippets, check_environment
from gvpo_trl.environments.sql import SqlEnvironments, load_tasks
from gvpo_trl.environments.sql.databases import DIFFICULTIES, SHAPES, build
from gvpo_trl.environments.sql.tasks import SYSTEM, VARIANTS, load_task
from gvpo_trl.environments.sql.words import POOLS
from gvpo_trl.failures import FailureKind
from gvpo_trl.faults import EnvironmentFault, SetupError
from gvpo_trl.rewards import passed_tests_share, task_goal_completion
from gvpo_trl.rollout.budgets import Budgets
from gvpo_trl.rollout.chat import Chat
from gvpo_trl.rollout.loop import RolloutLoop
from gvpo_trl.rollout.types import StopReason
from tests.environments.sql_attacks import COUNT, MEMORY
from tests.support.tiny import tiny_tokenizer
from tests.support.toy import Scripted

SQL = Snippets(
    verdicts={
        "SELECT 6 * 7": None,
        "SELECT 'Error: near \"x\": syntax error'": None,
        "SELECT missing": FailureKind.RUNTIME,
        "SELEC 1": FailureKind.SYNTAX,
        "DROP TABLE x; DROP TABLE y": FailureKind.RUNTIME,
        "CREATE TABLE x (y)": FailureKind.FORBIDDEN,
        "": FailureKind.NO_CODE,
        " \n ": FailureKind.NO_CODE,
    },
    shows_42="SELECT 6 * 7",
    keeps=None,
    leaks=None,
    random="SELECT name FROM sqlite_master",
    busy=COUNT.format(limit=6_000_000) + " SELECT max(x) FROM c",
    endless=COUNT.format(limit=-1) + " SELECT max(x) FROM c",
)
SOLVED_PER_SHAPE = 6


@pytest.fixture(scope="module")
def environments():
    with SqlEnvironments(max_episodes=32, workers=2) as environments:
        yield environments


def play(environments, task_id: str, queries) -> tuple[list, object]:
    episode = environments.open(task_id)
    try:
        return [episode.step(query) for query in queries], episode.score()
    finally:
        episode.close()


def ids(split: str, difficulty: int, databases: int) -> list[str]:
    return [f"sql/{split}/{difficulty}/{n}_{v + 1}" for n in range(databases) for v in range(VARIANTS)]


def test_the_protocol_holds():
    with SqlEnvironments(max_episodes=2, workers=2, max_operations=10**9, step_timeout_s=6) as environments:
        passed = check_environment(environments, "sql/train/1/0_1", snippets=SQL, deadline_slack_s=4)
    assert len(passed) == 9 and "deadline" in passed and "steps side by side" in passed


@pytest.mark.parametrize("split", SHAPES)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_task_is_solved_in_the_stated_number_of_queries(environments, split, difficulty):
    """3 or 4 queries at difficulty 1, up to 10 at difficulty 3; the last one alone answers."""
    for task_id in ids(split, difficulty, SOLVED_PER_SHAPE * len(SHAPES[split][difficulty])):
        task = load_task(task_id)
        low, high = {1: (3, 4), 2: (5, 6), 3: (7, 10)}[difficulty]
        assert low <= len(task.queries) <= high
        steps, score = play(environments, task_id, task.queries)
        assert all(step.failure is None for step in steps), (task_id, steps)
        assert [step.completed for step in steps] == [False] * (len(steps) - 1) + [True]
        assert score.success and score.passed == task.parts


@pytest.mark.parametrize("split", SHAPES)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_each_query_needs_what_the_ones_before_it_showed(environments, split, difficulty):
    """Every name and value of a query stands in the question or in an earlier observation."""
    language = set(re.findall(r"\w+", f"{SYSTEM} SELECT FROM WHERE AND SUM answer sqlite_master name sql"))
    for task_id in ids(split, difficulty, 2 * len(SHAPES[split][difficulty])):
        task = load_task(task_id)
        episode = environments.open(task_id)
        seen = set(re.findall(r"\w+", task.question)) | language
        for number, query in enumerate(task.queries):
            unknown = set(re.findall(r"\w+", query)) - seen
            assert not unknown, (task_id, number, query, unknown)
            seen |= set(re.findall(r"\w+", episode.step(query).text))
        episode.close()


def test_wrong_answers_get_nothing(environments):
    """No answer, one value too many, two answers, the values in another order, and a number that is off by one."""
    for split in SHAPES:
        for task_id in ids(split, 3, 2):
            task = load_task(task_id)
            values = [value if isinstance(value, int) else f"'{value}'" for value in task.answer]
            first, second, last = values
            for sql in (
                "SELECT 1",
                f"SELECT answer({first}, {second}, {last}, 1)",
                f"SELECT answer({first}, {second}, {last}); SELECT answer(1)",
                f"SELECT answer({last}, {first}, {first}) WHERE {int(task.answer[0] != task.answer[1])}",
                "SELECT answer(NULL, NULL, NULL)",
            ):
                assert play(environments, task_id, [sql])[1].reward == 0, sql
            steps, score = play(
                environments, task_id, [f"SELECT answer({first}, {second}, {last + 1})", *task.queries]
            )
            assert steps[-1].completed and not score.success, "the first answer counts"


def test_the_reward_is_binary_or_the_share_of_right_values(environments):
    task_id = "sql/train/3/0_1"
    first, second, _ = load_task(task_id).answer
    _, score = play(environments, task_id, [f"SELECT answer('{first}', '{second}', 0)"])
    lists = {"passed_tests": [list(score.passed)], "failed_tests": [list(score.failed)]}
    assert passed_tests_share(**lists) == [pytest.approx(2 / 3)]
    assert task_goal_completion(**lists) == [0.0]


def test_guesses_are_rarely_right():
    """Without a look, a number of the right size is a guess at random; after a look at the right column, a row is.

    The bounds are those of chance: one in 900 for a number, one in 12 for a row.
    """
    rng = random.Random(0)
    blind = row = tried = 0
    for split in ("train", "dev", "test"):
        for difficulty in DIFFICULTIES:
            for task_id in ids(split, difficulty, 60):
                task = load_task(task_id)
                tried += 1
                blind += rng.randrange(100, 1000) == task.answer[-1]
                column = {value for table in task.tables for values in table.rows for value in values}
                assert not task.shape.total or task.answer[-1] not in column, "a total is no value of a row"
                measures = [v for t in task.tables for r in t.rows for v in r if isinstance(v, int) and v > 99]
                row += rng.choice(measures) == task.answer[-1]
    assert tried == 9 * 60 * VARIANTS
    assert blind / tried < 0.01 and row / tried < 0.03


def test_nothing_in_the_question_gives_the_answer_away():
    for split in SHAPES:
        for difficulty in DIFFICULTIES:
            for task_id in ids(split, difficulty, 20):
                task = load_task(task_id)
                assert str(task.answer[-1]) not in task.question


def test_splits_share_neither_words_nor_shapes():
    held = ("train", "dev", "test")
    for first in held:
        for second in held:
            if first < second:
                for field in (
                    "nouns",
                    "affixes",
                    "measures",
                    "names",
                    "groups",
                    "id_columns",
                    "name_columns",
                    "parts",
                ):
                    assert not set(getattr(POOLS[first], field)) & set(getattr(POOLS[second], field)), field
                for difficulty in DIFFICULTIES:
                    assert not set(SHAPES[first][difficulty]) & set(SHAPES[second][difficulty])
    tables = {split: {t.name for n in range(50) for t in build(split, 3, n, 1).tables} for split in held}
    assert not (tables["train"] & tables["test"] or tables["train"] & tables["dev"] or tables["dev"] & tables["test"])


def test_a_task_is_the_same_byte_for_byte():
    """The digest changes only together with `VERSION`: a change here changes the tasks of everyone's runs."""
    text = repr([build(split, d, n, v) for split in SHAPES for d in DIFFICULTIES for n in range(6) for v in (1, 2)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest == "6834f7d1fc36b93d"


def test_load_tasks():
    tasks = load_tasks("test", difficulties=(3,), count=210)
    assert len(set(tasks["task_id"])) == 210 and set(tasks["difficulty"]) == {3}
    assert len({str(prompt) for prompt in tasks["prompt"]}) > 200 and len(set(tasks["scenario"])) == 70
    assert [message["role"] for message in tasks[0]["prompt"]] == ["system", "user"]
    assert list(load_tasks("test", count=3)["task_id"])[:3] == list(load_tasks("test", count=9)["task_id"])[:3]
    assert list(load_tasks(["sql/dev/2/7_3"])["difficulty"]) == [2]
    assert load_tasks("dev", system="Hi.")[0]["prompt"][0]["content"] == "Hi."


@pytest.mark.parametrize(
    "call",
    [
        lambda: load_tasks("tset"),
        lambda: load_tasks("test", difficulties=(4,)),
        lambda: load_tasks("test", count=0),
        lambda: load_tasks([]),
        lambda: load_tasks(["sql/test/1/0_4"]),
        lambda: load_tasks(["sql/test/1/007_1"]),
        lambda: load_task("sql/test/0/0_1"),
        lambda: load_task(7),
    ],
)
def test_unknown_tasks_are_refused(call):
    with pytest.raises(SetupError):
        call()


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_bounded_in_a_worker(environments, name):
    """The worker lives on, and its next step on the same database executes."""
    (attack, control), _ = play(environments, "sql/train/1/0_1", [MEMORY[name].sql, MEMORY[name].control])
    assert attack.failure in (FailureKind.MEMORY, *MEMORY[name].also), attack.text
    assert control.failure is None, control.text


def test_a_worker_that_is_late_is_ended(monkeypatch):
    """Between two operations nothing looks at the clock, so the trainer's side has a deadline of its own."""
    from gvpo_trl.environments.sql import client

    monkeypatch.setattr(client, "GRACE_S", -4.9)
    with SqlEnvironments(max_operations=10**12) as environments:
        (slow, after), _ = play(environments, "sql/train/1/0_1", [SQL.endless, "SELECT 6 * 7"])
        assert slow.failure is FailureKind.TIMEOUT
        assert after.failure is None and "42" in after.text


def workers_of(pid: int) -> list[int]:
    listing = (path for path in os.listdir("/proc") if path.isdigit())
    found = []
    for entry in listing:
        try:
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as command:
                if int(stat.read().rpartition(")")[2].split()[1]) == pid and "sql.worker" in command.read():
                    found.append(int(entry))
        except OSError:
            continue
    return found


def test_a_worker_that_dies_is_replaced():
    """It runs no step of its own: the same step runs on the next worker, and nothing is a failure of the agent."""
    before = set(workers_of(os.getpid()))
    with SqlEnvironments(workers=1) as environments:
        episode = environments.open("sql/train/1/0_1")
        assert "42" in episode.step(SQL.shows_42).text
        (worker,) = set(workers_of(os.getpid())) - before
        os.kill(worker, signal.SIGKILL)
        assert "42" in episode.step(SQL.shows_42).text
        assert set(workers_of(os.getpid())) - before != {worker}
    assert set(workers_of(os.getpid())) == before, "closed environments leave no process"


def test_a_step_on_which_two_workers_die_is_a_fault(monkeypatch):
    """The machinery may be to blame, so it is no failure of the agent; the episode can go on."""
    from gvpo_trl.environments.sql import client

    asked = []

    def die(worker, request):
        asked.append(request)
        raise BrokenPipeError

    with SqlEnvironments(workers=1) as environments:
        episode = environments.open("sql/train/1/0_1")
        with monkeypatch.context() as patch:
            patch.setattr(client._Worker, "ask", die)
            with pytest.raises(EnvironmentFault, match="two workers died"):
                episode.step(SQL.shows_42)
        assert len(asked) == 2
        assert "42" in episode.step(SQL.shows_42).text


def test_workers_outlive_the_thread_that_needed_them_first():
    before = set(workers_of(os.getpid()))
    with SqlEnvironments(workers=1) as environments:
        thread = threading.Thread(target=lambda: play(environments, "sql/train/1/0_1", ["SELECT 1"]))
        thread.start()
        thread.join()
        first = set(workers_of(os.getpid())) - before
        play(environments, "sql/train/1/0_1", ["SELECT 1"])
        assert len(first) == 1 and set(workers_of(os.getpid())) - before == first


def test_workers_die_with_the_trainer():
    program = (
        "import os, signal\n"
        "from gvpo_trl.environments.sql import SqlEnvironments\n"
        "environments = SqlEnvironments()\n"
        "environments.start()\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "ready\n"
        (worker,) = workers_of(trainer.pid)
        trainer.kill()
    deadline = time.monotonic() + 30
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_worker_gets_no_secret_of_the_trainer(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    before = set(workers_of(os.getpid()))
    with SqlEnvironments(workers=1) as environments:
        environments.start()
        (worker,) = set(workers_of(os.getpid())) - before
        try:
            with open(f"/proc/{worker}/environ") as environment:
                text = environment.read()
        except PermissionError:
            pytest.skip("this user cannot read a restricted process's environment, which is the point")
    assert "PYTHONPATH" in text and "hf_secret" not in text


def test_closed_environments_open_nothing():
    environments = SqlEnvironments()
    episode = environments.open("sql/train/1/0_1")
    environments.close()
    environments.close()
    for call in (lambda: episode.step("SELECT 1"), lambda: environments.open("sql/train/1/0_1"), environments.start):
        with pytest.raises(EnvironmentFault):
            call()
    with pytest.raises(ValueError, match="workers=0"):
        SqlEnvironments(workers=0)


def test_many_threads_share_the_workers(environments):
    """Each of 200 episodes in 32 threads gets its own rows back."""
    task_ids = ids("train", 1, 66)
    with ThreadPoolExecutor(32) as pool:
        scores = list(pool.map(lambda i: play(environments, i, load_task(i).queries)[1], task_ids))
    assert all(score.success for score in scores)


def test_the_loop_runs_sql_blocks(environments):
    """A solved episode, one whose fence is Python's, and one with a wrong guess."""
    task_id = "sql/train/1/0_1"
    row = load_tasks([task_id])[0]
    tokenizer = tiny_tokenizer()
    solved = [f"I look.\n```sql\n{query}\n```" for query in load_task(task_id).queries]
    turns = {0: solved, 1: ["```python\nprint(1)\n```"], 2: ["```SQL\nSELECT answer(1);\n```\n```\nanswer\n```"]}
    budgets = Budgets(max_turns=4, max_turn_length=400, max_observation_length=400, max_completion_length=4000)
    loop = RolloutLoop(environments, Chat(tokenizer, [tokenizer.eos_token_id]), budgets)
    first, second, third = loop.run([task_id] * 3, [row["prompt"]] * 3, Scripted(tokenizer, turns))
    assert first.stop is StopReason.COMPLETED and first.reward == 1
    assert [step.looked_at_docs for step in first.steps] == [True, True, False]
    assert first.steps[-1].code == load_task(task_id).queries[-1]
    assert {step.failure for step in second.steps} == {FailureKind.NO_CODE}
    assert "```sql" in second.steps[0].observation
    assert third.stop is StopReason.COMPLETED and third.reward == 0 and len(third.steps) == 1
