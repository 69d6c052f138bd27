"""What the episodes of one environment share: the hosts that fork their processes, the evaluators and the limits."""

from dataclasses import dataclass
from pathlib import Path

from gvpo_trl.environments.appworld.engine.agents import host as agents
from gvpo_trl.environments.appworld.engine.worlds import host as worlds
from gvpo_trl.environments.appworld.evaluators import Evaluators
from gvpo_trl.environments.appworld.hosts import HostKeeper, Launch
from gvpo_trl.environments.appworld.limits import Limits
from gvpo_trl.environments.appworld.protection import Protection
from gvpo_trl.environments.appworld.tasks import task_folders
from gvpo_trl.environments.appworld.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """The machinery behind episodes; `AppWorldEnvironments` makes one and hands it to each of its episodes."""

    workspace: Workspace
    """Where the processes write."""
    limits: Limits
    """Deadlines and bounds of each episode."""
    worlds: HostKeeper
    """Keeps the host that forks worlds and evaluators."""
    agents: HostKeeper | None
    """Keeps the host that forks interpreters; `None` where agent code runs in its world's process."""
    evaluators: Evaluators
    """Processes that run the tasks' unit tests."""
    protection: Protection
    """What restricts the interpreters."""

    @property
    def keepers(self) -> tuple[HostKeeper, ...]:
        """The keepers of all hosts."""
        return (self.worlds,) if self.agents is None else (self.worlds, self.agents)

    def start(self) -> None:
        """Start the hosts that are not running, both at the same time, and wait until they are warm.

        Raises:
            SetupError: the restriction of the interpreters is required and not complete.
            HostFault, EnvironmentsExhausted: a host did not come up.
        """
        for keeper in self.keepers:
            keeper.begin()
        self.worlds.get()
        if self.agents is None:
            self.protection.warn()
        else:
            facts = self.agents.get().wait_ready()
            self.protection.learn(str(facts["level"]), facts["missing"])

    def report_success(self) -> None:
        """Forgive the hosts their earlier deaths: an episode was scored."""
        for keeper in self.keepers:
            keeper.report_success()

    def close(self) -> None:
        """End every process and delete what they wrote; idempotent."""
        for keeper in self.keepers:
            keeper.close()
        self.workspace.remove()


def make_machinery(
    root: Path,
    python: Path,
    workspace: Workspace,
    limits: Limits,
    *,
    isolation: str,
    require_sandbox: bool,
    memory_mb: int | None,
    max_restarts: int,
    fast: bool,
    rehearse: bool,
) -> Machinery:
    """Put the machinery together; no process starts yet. The arguments are those of `AppWorldEnvironments`."""
    task = task_folders(root)[0]
    shared = {
        "max_interactions": limits.max_interactions,
        "soft_timeout_s": int(limits.step_timeout_s),
        "max_output_chars": limits.max_output_chars,
        "memory_bytes": memory_mb * 1024 * 1024 if memory_mb else 0,
        "fast": fast,
    }
    # Agent code can find its host's configuration in memory, so that configuration holds no path to the data.
    for_agents = shared | {"canaries": [str(workspace.canary)]}
    for_worlds = shared | {
        "warm_up_task": task.name,
        "isolation": isolation,
        "rehearse": rehearse,
        "outputs": str(workspace.outputs),
        "scratch": str(workspace.scratch),
    }
    keeper = HostKeeper(
        Launch(name="host", python=python, module=worlds.__name__, workspace=workspace, config=for_worlds, root=root),
        max_restarts,
    )
    agent_keeper = HostKeeper(
        Launch(name="agent-host", python=python, module=agents.__name__, workspace=workspace, config=for_agents),
        max_restarts,
    )
    return Machinery(
        workspace=workspace,
        limits=limits,
        worlds=keeper,
        agents=agent_keeper if isolation == "split" else None,
        evaluators=Evaluators(keeper),
        protection=Protection(sandboxed=isolation == "split", required=require_sandbox),
    )
