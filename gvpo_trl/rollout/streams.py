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
    rows: tuple[int, ...] | None = None
    """The number of each row of this process, where they do not follow each other."""

    def seed(self, row: int, turn: int) -> int:
        """Return the seed, in [0, 2^31), of a turn.

        Args:
            row: the trajectory's row on this process.
            turn: the number of the turn in its trajectory, from 0.
        """
        number = self.first_row + row if self.rows is None else self.rows[row]
        key = repr((*self.key, number, turn))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
