"""Says which base weights an engine holds, for the keys of everything that is computed from them.

A sleep at level 2 may end with other weights than it began with. What was computed before is then of no use: keys and
values, states, drafts, and adapters that were packed with a look at the base. So their keys contain the digest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BaseIdentity:
    """The weights that one engine holds now. All sequences of the engine share the object."""

    digest: str = ""  # Of all ranks' weights, see weights_digest.py. It changes only while no sequence runs.
    num_changes: int = 0  # How often a wake-up has found other weights.

    def become(self, digest: str) -> bool:
        """Takes the digest of the weights that were read again. Returns whether they are others."""
        if digest == self.digest:
            return False
        self.digest = digest
        self.num_changes += 1
        return True
