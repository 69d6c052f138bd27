"""Faults of our machinery, with one class per boundary. The agent is not to blame for any of them.

The rollout loop catches an `EnvironmentFault` and starts the trajectory once more on a fresh episode. After a second
fault the row is unscorable. The agent never sees the text of a fault, and no fault shapes an advantage.
"""

from gvpo_trl.text import printable


class EnvironmentFault(Exception):
    """A part of our machinery broke. `boundary` names the part in logs and metrics."""

    boundary = "environment"

    def __str__(self) -> str:
        """Return the message with control characters escaped: it may quote what an agent or a server wrote."""
        return printable(super().__str__())


class HostFault(EnvironmentFault):
    """The host process that forks episodes died, never became ready, or cannot be reached."""

    boundary = "host"


class EpisodeFault(EnvironmentFault):
    """The world process of an episode died, or the connection to it broke."""

    boundary = "episode"


class ProtocolFault(EnvironmentFault):
    """A message between two processes was incomplete, malformed or too long."""

    boundary = "protocol"


class EvaluatorFault(EnvironmentFault):
    """The evaluator crashed or ran past its deadline."""

    boundary = "evaluator"


class GenerationFault(EnvironmentFault):
    """The generator refused or aborted one request. Other requests go on."""

    boundary = "generation"


class EnvironmentsExhausted(EnvironmentFault):
    """Hosts died again and again. Training stops with the last cause; the last checkpoint is intact."""

    boundary = "exhausted"


class SetupError(ValueError):
    """A mistake that the user has to correct first: no AppWorld environment, a wrong root, an unknown task."""
