"""Makes captured graphs executable in a thread. This takes some 8 ms for 32 layers, and cannot be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from lorafleet.workers.step.interruption import IsInterrupted, WorkInterrupted

LOOK_S = 0.0005  # Time between two looks for a request meanwhile.

Key = TypeVar("Key", bound=Hashable)
Captured = TypeVar("Captured")


class Instantiation(Generic[Key, Captured]):
    """The graphs that are being made executable, by a key that the caller chooses."""

    def __init__(self, device: torch.device) -> None:
        self._threads = ThreadPoolExecutor(1, "graph", _use, (device,))
        self._unfinished: dict[Key, tuple[Captured, Future[None]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._unfinished

    def begin(self, key: Key, captured: Captured, instantiate: Callable[[], None]) -> None:
        self._unfinished[key] = captured, self._threads.submit(instantiate)

    def finish(self, key: Key, is_interrupted: IsInterrupted) -> Captured:
        """Waits until the graph can be replayed, and returns what was captured.

        Raises what making it executable raises, and WorkInterrupted soon after is_interrupted() has become True. The
        thread then goes on, for a later call.
        """
        captured, instantiated = self._unfinished[key]
        while not wait([instantiated], LOOK_S).done:
            if is_interrupted():
                raise WorkInterrupted
        del self._unfinished[key]
        instantiated.result()
        return captured

    def forget(self) -> None:
        """Waits until the thread is done with all graphs, and drops them."""
        wait([instantiated for _, instantiated in self._unfinished.values()])
        self._unfinished = {}


def _use(device: torch.device) -> None:
    """Makes a GPU the device of this thread. Otherwise the thread would take memory of the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
