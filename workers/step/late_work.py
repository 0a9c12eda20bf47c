"""Does between steps what a start leaves for later: the change to a faster attention, and CUDA graphs of more sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

from lorafleet.workers.attention.switching_attention import SwitchingAttention
from lorafleet.workers.step.decode_graphs import DecodeGraphs
from lorafleet.workers.step.interruption import IsInterrupted, never


class LateWork:
    """The work that is left. Without arguments there is none.

    Args:
        switching: The attention of all steps, if it may be replaced.
        graphs: The graphs for decode steps, if there are any.
        reserve: Called after work that may have taken memory which was reserved for steps.
    """

    def __init__(
        self,
        switching: SwitchingAttention | None = None,
        graphs: DecodeGraphs | None = None,
        reserve: Callable[[], None] = lambda: None,
    ) -> None:
        self._switching = switching
        self._graphs = graphs
        self._reserve = reserve
        self.is_suspended = False  # Whether nothing may run, since the engine sleeps.
        self.switched_s = 0.0  # Unix time of the change of the attention; 0 if there was none.

    @property
    def awaits_attention(self) -> bool:
        """Whether the kernels of a faster attention are being compiled."""
        return self._switching is not None and self._switching.is_waiting

    @property
    def num_decode_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @property
    def fills_idle_time(self) -> bool:
        """Whether run() has something to do at once if there are no steps."""
        return not self.is_suspended and self._graphs is not None and self._graphs.has_more

    def run(self, *, is_idle: bool, is_interrupted: IsInterrupted = never) -> None:
        """Does a part of the work if it is time for one. Call it between two launches. Steps may be in flight.

        In idle time, the work is given up soon after is_interrupted() has become True, and begun anew by a later call.
        """
        if self.is_suspended:
            return
        if self._switching is not None and self._switching.poll():
            self.switched_s = time.time()
            if self._graphs is not None:
                self._graphs.replace_attention()
            self._reserve()
        elif self._graphs is not None and self._graphs.capture_one(
            is_idle=is_idle, is_interrupted=is_interrupted if is_idle else never
        ):
            self._reserve()

    def close(self) -> None:
        """Ends what runs in the background, and releases the graphs."""
        if self._switching is not None:
            self._switching.close()
        self._graphs = None
