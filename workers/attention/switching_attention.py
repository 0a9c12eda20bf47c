"""Serves with one attention backend while the kernels of a better one are compiled, then with the better one.

Both read the same caches, so sequences go on as they are. A backend plans each step by itself, so it may be replaced
between any two launches, also while steps are in flight on the device. The other one is made in a thread, since loading
its kernels and trying them takes a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
        make_next: Makes the other backend, of compiled kernels. It is called in a thread, beside steps.
        executor: Runs make_next.
    """

    def __init__(
        self,
        first: AttentionBackend,
        make_next: Callable[[], AttentionBackend],
        executor: Executor | None = None,
    ) -> None:
        self._current = first
        self._make_next = make_next
        self._build: BackgroundBuild | None = None
        self._executor = executor or ThreadPoolExecutor(1, "attention-switch")
        self._next: Future[AttentionBackend] | None = None  # None until the kernels have been compiled.

    def start(self, build: BackgroundBuild) -> None:
        """Waits from now on for a build of the other backend's kernels, which poll() looks at."""
        self._build = build
        log.info("a faster attention is being compiled beside the steps, and takes over when it is ready")

    @property
    def is_waiting(self) -> bool:
        """Whether the other backend may still come."""
        return self._build is not None

    def poll(self) -> bool:
        """Replaces the backend if the other one has been made of compiled kernels. Returns whether it did.

        Call it between two launches. A failure is logged once, and the first backend stays.
        """
        if self._build is None:
            return False
        if self._next is None:
            self._next = self._begin_to_make(self._build.poll())
        if self._next is None or not self._next.done():
            return False
        elapsed_s, error = self._build.elapsed_s, self._next.exception()
        self._build = None
        self._executor.shutdown(wait=False)
        if error is not None:
            log.warning("the attention stays as it is, since its faster kernels did not start: %s", error)
            return False
        self._current = self._next.result()
        log.info("the attention has been switched %.0f s after its compilation began", elapsed_s)
        return True

    def _begin_to_make(self, built: Built | None) -> Future[AttentionBackend] | None:
        """Begins to make the other backend if its kernels are compiled."""
        if built is None:
            return None
        if built.error:
            log.warning("the attention stays as it is, since its faster kernels could not be compiled: %s", built.error)
            self._build = None
            return None
        return self._executor.submit(self._make_next)

    def close(self) -> None:
        """Ends the build, if there is one, and waits until nothing is made any more."""
        if self._build is not None:
            self._build.close()
            self._build = None
        self._executor.shutdown()

    def plan(self, batch: AttentionBatch) -> None:
        self._current.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> AttentionBackend | None:
        return self._current.for_graph(num_seqs, max_context, drafts)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        return self._current.attend(layer, q_THD, out_THD)
