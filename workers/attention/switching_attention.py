"""Serves with one attention backend while the kernels of a better one are compiled, then with the better one.

Both read the same caches, so sequences go on as they are. A backend plans each step by itself, so it may be replaced
between any two launches, also while steps are in flight on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, DraftRows
from lorafleet.workers.attention.module_build import Built

log = logging.getLogger(__name__)


class BackgroundBuild(Protocol):
    """The part of ModuleBuild that is needed here."""

    @property
    def elapsed_s(self) -> float: ...

    def poll(self) -> Built | None: ...

    def close(self) -> None: ...


class SwitchingAttention:
    """Passes all calls to the present backend.

    Args:
        first: The backend until the build has ended, and afterwards if it fails.
        make_next: Makes the other backend, of compiled kernels.
    """

    def __init__(
        self,
        first: AttentionBackend,
        make_next: Callable[[], AttentionBackend],
    ) -> None:
        self._current = first
        self._make_next = make_next
        self._build: BackgroundBuild | None = None

    def start(self, build: BackgroundBuild) -> None:
        """Waits from now on for a build of the other backend's kernels, which poll() looks at."""
        self._build = build
        log.info("a faster attention is being compiled beside the steps, and takes over when it is ready")

    @property
    def is_waiting(self) -> bool:
        """Whether the other backend may still come."""
        return self._build is not None

    def poll(self) -> bool:
        """Replaces the backend if the other one's kernels are compiled. Returns whether it did.

        Call it between two launches. A failure is logged once, and the first backend stays.
        """
        built = None if self._build is None else self._build.poll()
        if built is None or self._build is None:
            return False
        elapsed_s, self._build = self._build.elapsed_s, None
        if built.error:
            log.warning("the attention stays as it is, since its faster kernels could not be compiled: %s", built.error)
            return False
        began_s = time.monotonic()
        try:
            self._current = self._make_next()
        except Exception as error:
            log.warning("the attention stays as it is, since its faster kernels did not start: %s", error)
            return False
        took_s = time.monotonic() - began_s
        log.info("the attention has been switched %.0f s after it began; steps waited for %.2f s", elapsed_s, took_s)
        return True

    def close(self) -> None:
        """Ends the build, if there is one."""
        if self._build is not None:
            self._build.close()
            self._build = None

    def plan(self, batch: AttentionBatch) -> None:
        self._current.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> AttentionBackend | None:
        return self._current.for_graph(num_seqs, max_context, drafts)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        return self._current.attend(layer, q_THD, out_THD)
