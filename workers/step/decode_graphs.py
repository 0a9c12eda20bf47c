"""Decides which CUDA graphs for decode steps are captured and when, and which one a step uses: one launch instead of
hundreds, for batches in which every sequence computes one token, or a token and the drafts behind it.

There are graphs for each of a dense set of batch sizes: one without adapters, so that base steps pay nothing for them,
others for few and for many tiles of adapters' tokens, and one that also launches what hardly any adapter has: Kronecker
products, and angles by slot. A mixture of experts has graphs for steps with adapters on experts too, so that the other
steps launch nothing for experts. Steps with drafts have graphs of their own (drafted_sizes.py). A step uses the
smallest graph that fits.

A graph takes some 0.1 s to capture. So a start captures the graphs of a few sizes only. A later step that would use
another one runs meanwhile by a slightly larger graph, or without one, and the graph is captured between two steps: at
once if there is nothing to do, else at most once every CAPTURE_PERIOD_S. The graphs of the largest size come first,
since the others fit into their memory. The ranks of a replica capture together, so they capture all of them at the
start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, count_tiles
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.step.decode_capture import DecodeGraph, DecodeKey
from lorafleet.workers.step.drafted_sizes import DraftedSizes, DraftShape
from lorafleet.workers.step.interruption import IsInterrupted, WorkInterrupted, never

log = logging.getLogger(__name__)

# Batch sizes whose graphs a start captures, besides the largest. Each size for which a kernel is compiled of its own is
# among them, since idle work cannot be interrupted while Triton compiles: for 1 s on an H200.
FIRST_SIZES = (1, 4, 16, 32, 64)
CAPTURE_PERIOD_S = 0.5  # Between two captures beside steps, which wait for each of them.
LITTLE_PADDING = 32  # a step of fewer rows takes about as long as one of so many


class Capturer(Protocol):
    """The part of DecodeCapture that is needed here."""

    def capture(self, key: DecodeKey, is_interrupted: IsInterrupted = never) -> DecodeGraph | None: ...

    def forget(self) -> None: ...

    def fill(self, decode: DecodeGraph, plan: StepPlan, unread: UnreadInputs | None = None) -> None: ...

    def replay(self, decode: DecodeGraph, num_rows: int) -> tuple[Tensor, Tensor]: ...


class AdapterSlotsOfSteps(Protocol):
    """The part of LoRAModelManager that is needed here."""

    def tile_counts(self, num_tokens: int) -> list[int]: ...

    def has_rare(self, slots: Sequence[int]) -> bool: ...

    def has_experts(self, slots: Sequence[int]) -> bool: ...


def graph_sizes(most: int) -> list[int]:
    """Returns batch sizes that are dense enough for little padding. From 32 on they grow by at most a quarter."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 1, 32), most}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """All graphs for decode steps. The constructor raises what capturing raises.

    Args:
        sizes: Batch sizes of the graphs.
        first_sizes: Those whose graphs the constructor captures, besides the largest.
        max_context: Number of tokens that the graphs have room for in each sequence.
        has_mixtures: Whether the model has mixtures of experts.
        drafted: Sizes of the graphs with drafts. None if there are none.
    """

    def __init__(
        self,
        capturer: Capturer,
        sizes: Sequence[int],
        first_sizes: Sequence[int],
        loras: AdapterSlotsOfSteps | None,
        max_context: int,
        has_mixtures: bool = False,
        clock: Callable[[], float] = time.monotonic,
        drafted: DraftedSizes | None = None,
    ) -> None:
        self._capturer = capturer
        self._loras = loras
        self._max_context = max_context
        self._has_mixtures = has_mixtures
        self._clock = clock
        self._sizes = sorted(sizes)
        self._drafted = drafted
        of_drafted = () if drafted is None else drafted.counts
        self._tiles = {size: [] if loras is None else loras.tile_counts(size) for size in (*sizes, *of_drafted)}
        self._graphs: dict[DecodeKey, DecodeGraph] = {}
        self._former: dict[DecodeKey, DecodeGraph] = {}  # Of the attention before, each until its successor is there.
        self._wanted: dict[DecodeKey, None] = {}  # keys that steps would have used, the latest last
        self._missing = self._all_keys()
        self._is_usable = True  # whether the attention has graphs
        self._captured_s = float("-inf")
        self._first_sizes = {self._sizes[-1], *first_sizes}
        self.capture_first()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def most(self) -> int:
        """Number of graphs once all are captured."""
        return len(self._graphs) + len(self._missing)

    @property
    def has_more(self) -> bool:
        """Whether there are graphs to capture when there is nothing else to do."""
        return self._is_usable and bool(self._missing)

    def capture_first(self) -> None:
        """Captures the graphs of the first sizes. Raises what capturing raises."""
        started = self._clock()
        for key in self._missing[:]:
            if self._is_usable and self._is_first(key):
                self._capture(key)
        seconds = self._clock() - started
        log.info("captured %d of %d CUDA graphs for decode steps in %.1f s", len(self), self.most, seconds)

    def restart(self) -> None:
        """Drops all graphs, after addresses have changed, and allows captures again."""
        self._graphs = {}
        self.replace_attention()

    def replace_attention(self) -> None:
        """Allows captures of all graphs again, after the attention has been replaced. The present graphs read the same
        caches, so steps go on to use them until there are new ones."""
        self._former, self._graphs, self._wanted = self._graphs, {}, {}
        self._capturer.forget()
        self._missing = self._all_keys()
        self._is_usable = True

    def capture_one(self, *, is_idle: bool, is_interrupted: IsInterrupted = never) -> bool:
        """Captures a graph if it is time for one. Returns whether it did. Call it between two launches.

        Without `is_idle`, only graphs that steps have lacked are captured, and not often. A capture is given up soon
        after is_interrupted() has become True, and begun anew by a later call.
        """
        if not self.has_more or not (is_idle or self._wanted):
            return False
        if not is_idle and self._clock() - self._captured_s < CAPTURE_PERIOD_S:
            return False
        key = self._missing[0]
        if self._wanted and key.num_rows != max(self._tiles):
            key = next(reversed(self._wanted))
        try:
            return self._capture(key, is_interrupted)
        except WorkInterrupted:
            return False
        except RuntimeError as error:  # such as a lack of memory
            if self._former:
                log.info("the graphs of the attention before are dropped, since capturing %s failed: %s", key, error)
                self._former = {}
                return False
            log.warning("no more CUDA graphs are captured, since %s failed: %s", key, error)
            self._missing, self._wanted = [], {}
            return False

    def find(
        self, lora_slots: list[int], context_lens: Sequence[int], *, may_shorten: bool = False
    ) -> DecodeGraph | None:
        """Returns the graph that fits with the fewest rows, then the fewest tiles. Returns None if none is large
        enough, or none that is captured is nearly as small.

        Args:
            lora_slots: Each row's slot, or BASE_SLOT. There are more rows than sequences if any has drafts.
            context_lens: Each sequence's number of tokens. Only an adapter with a rope of its own may have more than
                the graphs take.
            may_shorten: Whether sequences may turn out to be shorter, which graphs with drafts take.
        """
        if not self._is_usable:
            return None
        num_rows, num_seqs = len(lora_slots), len(context_lens)
        has_drafts = may_shorten or num_rows > num_seqs
        if not has_drafts:
            fitting = [size for size in self._sizes if size >= num_rows]
        else:
            fitting = [] if self._drafted is None else self._drafted.fitting(num_rows, num_seqs)
        if not fitting:
            return None
        has_adapters = lora_slots.count(BASE_SLOT) < num_rows
        takes_rare = has_adapters and self._loras is not None and self._loras.has_rare(lora_slots)
        if takes_rare and max(context_lens) > self._max_context:
            return None
        best, *larger = [size for size in fitting if size <= max(LITTLE_PADDING, 2 * fitting[0])]
        keys = self._fitting_keys(best, self._shape(best, has_drafts), lora_slots, has_adapters, takes_rare)
        if keys[0] in self._graphs:
            return self._graphs[keys[0]]
        self._want(keys[0])
        for size in larger:
            keys += self._fitting_keys(size, self._shape(size, has_drafts), lora_slots, has_adapters, takes_rare)
        found = (self._graphs.get(key) or self._former.get(key) for key in keys)
        return next((graph for graph in found if graph is not None), None)

    def fill(self, decode: DecodeGraph, plan: StepPlan, unread: UnreadInputs | None = None) -> None:
        """Does what DecodeCapture.fill does."""
        self._capturer.fill(decode, plan, unread)

    def replay(self, decode: DecodeGraph, num_rows: int) -> tuple[Tensor, Tensor]:
        """Does what DecodeCapture.replay does."""
        return self._capturer.replay(decode, num_rows)

    def _shape(self, size: int, has_drafts: bool) -> DraftShape | None:
        return self._drafted.shape(size) if has_drafts and self._drafted is not None else None

    def _all_keys(self) -> list[DecodeKey]:
        """Returns all graphs, the largest ones first."""
        kinds = [(size, False) for size in self._sizes]
        if self._drafted is not None:
            kinds += [(size, True) for size in self._drafted.counts]
        return [
            key
            for size, has_drafts in sorted(kinds, reverse=True)
            for key in self._keys(size, self._shape(size, has_drafts))
        ]

    def _is_first(self, key: DecodeKey) -> bool:
        """Returns whether a start captures the graph: the first sizes, and the largest of all."""
        if key.drafts is None or self._drafted is None:
            return key.num_rows in self._first_sizes
        return key.num_rows in self._drafted.first or key.num_rows == max(self._tiles)

    def _keys(self, size: int, drafts: DraftShape | None) -> list[DecodeKey]:
        keys = [DecodeKey(size, 0, drafts=drafts)]
        tiles = self._tiles[size]
        for count in tiles:
            keys.append(DecodeKey(size, count, drafts=drafts))
            if self._has_mixtures:
                keys.append(DecodeKey(size, count, takes_experts=True, drafts=drafts))
        if tiles:
            keys.append(DecodeKey(size, tiles[-1], takes_rare=True, takes_experts=self._has_mixtures, drafts=drafts))
        return keys

    def _fitting_keys(
        self, size: int, drafts: DraftShape | None, lora_slots: list[int], has_adapters: bool, takes_rare: bool
    ) -> list[DecodeKey]:
        """Returns the graphs of this size that a step may use, the best one first."""
        if not has_adapters or self._loras is None:
            return [DecodeKey(size, 0, drafts=drafts)]
        if takes_rare:
            return [DecodeKey(size, self._tiles[size][-1], True, self._has_mixtures, drafts)]
        needed, takes_experts = count_tiles(lora_slots, size), self._loras.has_experts(lora_slots)
        return [DecodeKey(size, count, False, takes_experts, drafts) for count in self._tiles[size] if count >= needed]

    def _want(self, key: DecodeKey) -> None:
        if key in self._missing:
            self._wanted.pop(key, None)
            self._wanted[key] = None

    def _capture(self, key: DecodeKey, is_interrupted: IsInterrupted = never) -> bool:
        graph = self._capturer.capture(key, is_interrupted)
        self._captured_s = self._clock()
        if graph is None:
            if key.drafts is not None:
                self._drop_drafted()
            else:
                self._is_usable, self._former = False, {}
            return False
        self._graphs[key] = graph
        self._missing.remove(key)
        self._wanted.pop(key, None)
        self._former.pop(key, None)
        return True

    def _drop_drafted(self) -> None:
        """Captures no graphs with drafts, since the attention has none."""
        self._missing = [key for key in self._missing if key.drafts is None]
        self._wanted = {key: None for key in self._wanted if key.drafts is None}
