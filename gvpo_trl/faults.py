"""Failures of the machinery, one class per boundary. None of them is ever the agent's fault.

The rollout loop catches `EnvironmentFault`, retries the trajectory once on a fresh episode, and else marks its row
unscorable: the agent never sees these texts and no advantage is shaped by them.
"""

from gvpo_trl.reporting.text import printable


class EnvironmentFault(Exception):
    """Our side broke. `boundary` names where, for the log and the metric."""

    boundary = "environment"

    def __str__(self) -> str:
        """Return the message with control characters escaped: it may quote what an agent or a server wrote."""
        return printable(super().__str__())


class HostFault(EnvironmentFault):
    """The host process that forks episodes died, never became ready, or cannot be reached."""

    boundary = "host"


class EpisodeFault(EnvironmentFault):
    """An episode's world process died or its channel broke."""

    boundary = "episode"


class ProtocolFault(EnvironmentFault):
    """A message on a channel was cut, malformed or too long."""

    boundary = "protocol"


class EvaluatorFault(EnvironmentFault):
    """The evaluator crashed or ran past its deadline."""

    boundary = "evaluator"


class GenerationFault(EnvironmentFault):
    """The generator refused or broke off one request; the other requests are not concerned."""

    boundary = "generation"


class EnvironmentsExhausted(EnvironmentFault):
    """Hosts died repeatedly; training stops with the last cause and the checkpoint is intact."""

    boundary = "exhausted"


class SetupError(ValueError):
    """What the user has to mend before anything runs: a missing AppWorld environment, a bad root, an unknown task."""
