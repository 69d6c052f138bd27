"""Random streams of a rollout: each turn is sampled with a seed of its own.

The seed depends on the run's seed, the optimizer step, the trajectory's row and the number of the turn, and on nothing
that happens during the rollout. So the sampled tokens do not depend on which trajectories are ready at the same time.
A trajectory that starts again after a fault samples the same turns again.
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Streams:
    """The seeds of all turns of one rollout."""

    key: tuple[int | str, ...]
    """What tells this rollout from every other one of the run: seed, step, and so on."""
    first_row: int = 0
    """The number of this process's first row among the rows of all processes."""

    def seed(self, row: int, turn: int) -> int:
        """Return the seed, in [0, 2^31), of a turn.

        Args:
            row: the trajectory's row on this process.
            turn: the number of the turn in its trajectory, from 0.
        """
        key = repr((*self.key, self.first_row + row, turn))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
