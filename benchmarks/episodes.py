"""Episodes against AppWorld's HTTP servers: `python -m benchmarks.episodes --root DIR` (`gvpo-trl appworld pocket`).

The same episodes are played in three ways, with the same number of runners: by our processes in both isolation modes,
and by one `appworld serve environment` per runner, which serves the whole run as in Apple's LOOP (initialize, execute,
evaluate, then the next task on the same server). An episode runs a task's reference solution in about four executions
and its unit tests. The benchmark fails unless all ways give the same texts and the same test results.
"""

import argparse
import ast
import contextlib
import functools
import http.client
import itertools
import json
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import finish, interleaved, ratio
from gvpo_trl.environments.appworld import AppWorldEnvironments
from tests.environments.http.http_servers import HttpServers

EXECUTIONS = 4
"""Executions in which a solution is run, where it has that many statements."""
CLOCK = "time.clock_gettime(time.CLOCK_MONOTONIC)"
"""The one clock in reach of agent code that AppWorld does not freeze."""
TIMED_STEP = f"import time\nstarted = {CLOCK}\napis.supervisor.show_profile()\nprint({CLOCK} - started)"
TIMED_STEPS = 50

Script = tuple[str, tuple[str, ...]]
"""A task and the code of its steps."""
Seen = tuple[list[str], list[str], list[str]]
"""Texts of the steps, requirements of the tests that passed and of those that failed."""


class Ours:
    """Plays episodes with our processes in one isolation mode."""

    def __init__(self, options: argparse.Namespace, isolation: str, max_episodes: int):
        self.environments = AppWorldEnvironments(
            options.root, venv=options.venv, max_episodes=max_episodes, isolation=isolation
        )
        self.resets: list[float] = []
        self.evaluations: list[float] = []

    def play(self, script: Script) -> Seen:
        """Play one episode from its opening to its end."""
        task_id, codes = script
        with self.environments.open(task_id) as episode:
            texts = [episode.step(code).text for code in codes]
            started = time.perf_counter()
            score = episode.score()
            self.evaluations.append(time.perf_counter() - started)
        self.resets.append(episode.reset.seconds)
        return texts, sorted(score.passed), sorted(score.failed)


class Http:
    """Plays episodes on AppWorld's servers, each over one connection that its runner hands on."""

    def __init__(self, servers: HttpServers):
        self._numbers = itertools.count(1)
        self.free: queue.Queue[http.client.HTTPConnection] = queue.Queue()
        for url in servers.urls:
            self.free.put(http.client.HTTPConnection(url.removeprefix("http://"), timeout=120))

    def play(self, script: Script) -> Seen:
        """Play one episode from its opening to its end."""
        task_id, codes = script
        server = self.free.get()
        try:
            self._ask(server, "initialize", task_id=task_id, experiment_name=f"benchmark-{next(self._numbers)}")
            texts = [self._ask(server, "execute", task_id=task_id, code=code) for code in codes]
            report = self._ask(server, "evaluate", task_id=task_id, suppress_errors=True)
        finally:
            self.free.put(server)
        passed, failed = ([test["requirement"] for test in report[name]] for name in ("passes", "failures"))
        return texts, sorted(passed), sorted(failed)

    @staticmethod
    def _ask(server: http.client.HTTPConnection, what: str, **body: Any) -> Any:
        server.request("POST", f"/{what}", json.dumps(body), {"Content-Type": "application/json"})
        response = server.getresponse()
        answer = response.read()
        assert response.status == 200, f"{what} of {body['task_id']}: status {response.status}"
        return json.loads(answer)["output"]

    def let_go(self) -> None:
        """Close the connections, as the servers do after some idle seconds; they open again when they are used."""
        for _ in range(self.free.qsize()):
            server = self.free.get()
            server.close()
            self.free.put(server)


def main() -> None:
    options = _options()
    scripts = _scripts(options)
    result: dict[str, Any] = {"benchmark": "episodes", "runners": options.runners, "cores": os.cpu_count()}
    result |= {"episodes": len(scripts), "executions": sum(len(codes) for _, codes in scripts) / len(scripts)}
    result |= _measure_speed(options, scripts)
    result |= _measure_live(options, scripts)
    finish(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="data root of the pocket tasks")
    parser.add_argument("--venv", type=Path, help="AppWorld's virtual environment, where it is not the default one")
    parser.add_argument("--runners", type=int, default=2, help="episodes at a time, and HTTP servers")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of each way in each repeat")
    parser.add_argument("--repeats", type=int, default=6, help="a multiple of three lets each way begin equally often")
    parser.add_argument("--live", type=int, default=64, help="episodes that are open at a time to measure the memory")
    return parser.parse_args()


def _scripts(options: argparse.Namespace) -> list[Script]:
    task_ids = (options.root / "data" / "datasets" / "train.txt").read_text().split()
    spread = [task_ids[number * len(task_ids) // options.episodes] for number in range(options.episodes)]
    return [(task_id, _codes(options.root, task_id)) for task_id in spread]


def _codes(root: Path, task_id: str) -> tuple[str, ...]:
    """A solution's statements in `EXECUTIONS` groups of about the same length."""
    source = (root / "data" / "tasks" / task_id / "ground_truth" / "solution.py").read_text()
    statements = [ast.unparse(statement) for statement in ast.parse(source).body[0].body]
    groups = min(EXECUTIONS, len(statements))
    bounds = [number * len(statements) // groups for number in range(groups + 1)]
    return tuple("\n".join(statements[start:end]) for start, end in itertools.pairwise(bounds))


def _measure_speed(options: argparse.Namespace, scripts: list[Script]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        ours = Ours(options, "split", options.runners)
        process = Ours(options, "process", options.runners)
        for side in (ours, process):
            stack.enter_context(side.environments).start()
        http_side = Http(stack.enter_context(HttpServers(options.root, options.runners, options.venv)))
        pool = stack.enter_context(ThreadPoolExecutor(options.runners))
        seen: list[tuple[str, list[Seen]]] = []
        used: dict[str, list[tuple[float, float]]] = {"ours": [], "process": [], "http": []}

        def run(name: str, play: Callable[[Script], Seen]) -> None:
            before = _processor_seconds()
            seen.append((name, list(pool.map(play, scripts))))
            http_side.let_go()
            used[name].append(tuple(now - then for now, then in zip(_processor_seconds(), before, strict=True)))

        plays = {"ours": ours.play, "process": process.play, "http": http_side.play}
        ways = {name: functools.partial(run, name, play) for name, play in plays.items()}
        interleaved(ways, 1)  # caches get warm
        for kept in (ours.resets, ours.evaluations, *used.values()):
            kept.clear()
        seconds, _ = interleaved(ways, options.repeats)
        _check(scripts, seen)
        overhead = _step_overhead(ours.environments, scripts[0][0])
    result = {f"{name}_episodes_per_s": len(scripts) / statistics.median(times) for name, times in seconds.items()}
    for number, what in enumerate(("cpu_ms", "kernel_ms")):
        medians = {name: statistics.median(times[number] for times in ways) for name, ways in used.items()}
        result[what] = {name: 1000 * seconds / len(scripts) for name, seconds in medians.items()}
    return result | {
        "ratio": ratio(seconds["http"], seconds["ours"]),
        "process_ratio": ratio(seconds["http"], seconds["process"]),
        "reset_ms": 1000 * statistics.median(ours.resets),
        "step_overhead_ms": 1000 * overhead,
        "evaluate_ms": 1000 * statistics.median(ours.evaluations),
    }


def _check(scripts: list[Script], seen: list[tuple[str, list[Seen]]]) -> None:
    """Check that all ways gave the same results and that the solutions pass."""
    for number, (task_id, _) in enumerate(scripts):
        texts, passed, failed = expected = seen[-1][1][number]
        assert passed and not failed, f"{task_id}: the solution fails {failed}: {texts}"
        for name, results in seen:
            assert results[number] == expected, f"{task_id}: {name} gives {results[number]}, not {expected}"


def _step_overhead(environments: AppWorldEnvironments, task_id: str) -> float:
    """Median seconds that a step takes beyond the time that its own code measures."""
    with environments.open(task_id) as episode:
        overheads = []
        for _ in range(TIMED_STEPS):
            started = time.perf_counter()
            step = episode.step(TIMED_STEP)
            overheads.append(time.perf_counter() - started - float(step.text))
    return statistics.median(overheads)


def _measure_live(options: argparse.Namespace, scripts: list[Script]) -> dict[str, Any]:
    """Memory of all our processes but this one, while many episodes are open and have run a step."""
    ours = Ours(options, "split", options.live)
    with ours.environments as environments, contextlib.ExitStack() as stack:
        environments.start()

        def begin(script: Script) -> Any:
            episode = environments.open(script[0])
            step = episode.step(script[1][0])
            assert step.failure is None, f"{script[0]}: {step.text}"
            return episode

        with ThreadPoolExecutor(options.runners) as pool:
            for episode in pool.map(begin, itertools.islice(itertools.cycle(scripts), options.live)):
                stack.callback(episode.close)
        return {"live_episodes": options.live, "rss_mb": sum(map(_kilobytes, _descendants(os.getpid()))) / 1024}


def _processor_seconds() -> tuple[float, float]:
    """Processor time of all our processes but this one, the ended ones included, and the kernel's part of it."""
    user = kernel = 0
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            user, kernel = user + int(fields[11]) + int(fields[13]), kernel + int(fields[12]) + int(fields[14])
    return (user + kernel) / os.sysconf("SC_CLK_TCK"), kernel / os.sysconf("SC_CLK_TCK")


def _descendants(ancestor: int) -> Iterator[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        parent = pid
        while (parent := parents.get(parent)) is not None:
            if parent == ancestor:
                yield pid
                break


def _kilobytes(pid: int) -> int:
    """The proportional set size of a process, to which a page shared by n processes adds one n-th.

    Only root can read it for a process that is not dumpable. For others the resident set is taken instead.
    """
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with contextlib.suppress(PermissionError):
            lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith(field))
    raise PermissionError(f"the memory of process {pid} cannot be read")


if __name__ == "__main__":
    main()
