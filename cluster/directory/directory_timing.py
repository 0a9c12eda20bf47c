"""The times after which the directory, and the replicas that follow it, stop waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectoryTiming:
    """The waits of the directory and of its replicas, in seconds. The first three are safe only together.

    A replica may answer from its copies for lease_s after it *sent* the last watch call that was answered. A watch call
    is held for at most hold_s, so the lease of a healthy replica never expires. A write that has waited acknowledge_s
    for a silent replica may return: the replica's lease has expired, so it asks the directory before it answers.
    """

    hold_s: float = 1.0
    lease_s: float = 4.0
    acknowledge_s: float = 5.0
    forget_s: float = 60.0  # Silence after which a replica that did not leave counts as gone.
    hand_over_s: float = 10.0  # A replica being stopped waits so long for others to read what only it holds.
    # New locations of adapters are published at once, but to all routers together, since one answer serves all routers
    # at the same version. Loads are gathered for longer, since each of a thousand replicas may report ten times a
    # second.
    moves_s: float = 0.002
    loads_s: float = 0.05
    gather_s: float = 0.02  # Time for which joins are gathered; a thousand replicas may join within a second.
    retry_s: float = 0.1  # Pause of a replica before it repeats a call that failed.
    patience_s: float = 10.0  # A call waits so long for a directory that is being restarted, is stopped or is slow.
    start_s: float = 120.0  # A starting replica waits so long; the directory's process may start with it.
    admit_s: float = 1.0  # A request waits so long for the quotas.


TIMING = DirectoryTiming()
