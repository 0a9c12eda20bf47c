"""Gives the GPU memory of one rank back, and takes it again.

The memory is in two parts, which requests call tags. `weights` are the base's weights and the slots of adapters.
`kv_cache` is the KV cache and the states of recurrent layers. CUDA graphs have the addresses of both, so they leave
with the first part and are captured again once both are back. Workspaces of attention and of libraries stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import torch
from safetensors import SafetensorError

from lorafleet.protocol.engine_control import MemoryTag, SleepLevel
from lorafleet.protocol.errors import ConfigError, LorafleetError, Overloaded
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.model_loading import digest_of
from lorafleet.workers.pool.pool_start import PoolStart
from lorafleet.workers.sleep.storages import SizedStorages, SleepingMemory, StorageCopy
from lorafleet.workers.sleep.weights_gate import WeightsGate
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.step_runner import StepRunner

log = logging.getLogger(__name__)

# Weights up to this size stay in host memory at level 2 too. Constants of quantized formats, which no file has, are
# among them.
SMALL_BYTES = 16 << 20


class RankMemory:
    """The memory of one rank. No step may be queued while a method runs, and none while a part is asleep.

    Args:
        slots: The adapter slots, which are empty whenever the weights leave. None without adapters.
        tiers: The tiers below the KV cache, which copy nothing from or to it meanwhile. Empty without tiers.
        gate: The access of loads to the weights.
        reload: Fills the model with the checkpoint's weights again. None if that is not possible.
        digest: This rank's part of the weights, see weights_digest.py.
        pool: The memory that adapters and KV blocks share. All borrowed memory is back whenever a part leaves. None if
            their shares are fixed.
        head_steps: Runs the head that drafts with the base's embedding, whose address its CUDA graphs have. None
            without such a head.
    """

    def __init__(
        self,
        steps: StepRunner,
        slots: LoRAModelManager | None,
        tiers: Collection[RankTiers],
        gate: WeightsGate,
        reload: Callable[[], None] | None,
        digest: str,
        pool: PoolStart | None = None,
        head_steps: StepRunner | None = None,
    ) -> None:
        self.digest = digest  # Of the weights that were read last.
        self._steps = steps
        self._captured = [steps] if head_steps is None else [steps, head_steps]
        self._slots = slots
        self._tiers = tiers
        self._gate = gate
        self._reload = reload
        self._weights = SizedStorages(steps.model.parameters())
        arena = [] if slots is None or slots.arena is None else [slots.arena]
        caches = [tensor for cache in steps.caches for tensor in (cache.k_NPGD, cache.v_NPGD)]
        states = [] if steps.states is None else steps.states.tensors
        # The storages of a pool are not resizable, so SizedStorages passes them over.
        self._parts: dict[MemoryTag, list[SleepingMemory]] = {
            "weights": [self._weights, SizedStorages(arena)],
            "kv_cache": [SizedStorages([*caches, *states])],
        }
        if pool is not None and pool.arena is not None:
            self._parts["weights"].append(pool.arena)
        if pool is not None and pool.groups is not None:
            self._parts["kv_cache"].append(pool.groups)
        self._asleep: set[MemoryTag] = set()
        self._level: SleepLevel = 1
        # Only a wake-up from level 2 changes the weights. So the copy of a first sleep at level 1 serves all later ones
        # at this level. At level 2 it has small weights, which the checkpoint's overwrite as far as it has them.
        self._copy: StorageCopy | None = None
        self._copy_level: SleepLevel = 1

    @property
    def reloads(self) -> bool:
        """Whether the weights can be read from the checkpoint again."""
        return self._reload is not None

    @torch.inference_mode()
    def release(self, tags: Collection[MemoryTag], level: SleepLevel) -> None:
        """Frees the memory of these parts. At level 1 the weights are copied to host memory first."""
        began_s = time.monotonic()
        self._synchronize()
        if not self._asleep:
            self._release_graphs()
        if "weights" in tags:
            self._gate.close()
            self._level = level
            if "weights" not in self._asleep:  # They are if they could not be taken again.
                self._copy_weights(level)
            if self._slots is not None:
                self._slots.extra_memory.let_go()
        self._asleep |= set(tags)
        for tag in tags:
            for part in self._parts[tag]:
                part.empty()
        if self._steps.device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("%s asleep at level %d after %.1f s", _named(tags), level, time.monotonic() - began_s)

    @torch.inference_mode()
    def take(self, tags: Collection[MemoryTag]) -> None:
        """Takes the memory of these parts again, with the weights. Raises LorafleetError if that is not possible.
        Then release() must be called again for the same parts."""
        began_s = time.monotonic()
        parts = [part for tag in tags for part in self._parts[tag]]
        try:
            for part in parts:
                part.allocate()
        except RuntimeError as error:
            needed = sum(part.num_bytes for part in parts)
            raise Overloaded(
                f"{needed / 2**30:.2f} GiB are needed to wake up, and there is not so much free memory. The replica "
                f"stays asleep. Free memory in the trainer's process (torch.cuda.empty_cache) and repeat. ({error})"
            ) from error
        if "weights" in tags:
            self._fill_weights()
        if "kv_cache" in tags:
            if self._steps.states is not None:
                self._steps.states.find_addresses()
            for tiers in self._tiers:
                tiers.find_addresses()
        self._synchronize()
        self._asleep -= set(tags)
        if "weights" in tags:
            self._gate.open()
        log.info("%s awake after %.1f s", _named(tags), time.monotonic() - began_s)

    def capture(self) -> None:
        """Captures the CUDA graphs again, once all parts are awake. All ranks must do so together."""
        assert not self._asleep
        began_s = time.monotonic()
        try:
            for steps in self._captured:
                steps.capture_graphs()
        except RuntimeError as error:  # such as a lack of memory
            if self._steps.model.group.size > 1:
                raise
            self._release_graphs()
            log.warning("steps run without CUDA graphs for now, since they were not captured again: %s", error)
        self._synchronize()
        log.info("ready for steps after another %.1f s", time.monotonic() - began_s)

    def close_steps(self) -> None:
        """Ends the steps for good. The group of the ranks cannot be left before."""
        for steps in self._captured:
            steps.close()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    def _release_graphs(self) -> None:
        for steps in self._captured:
            steps.release_graphs()

    def _copy_weights(self, level: SleepLevel) -> None:
        """Makes sure that there is the host's copy for this level."""
        if self._copy is not None and self._copy_level == level:
            return
        if self._copy is not None:
            self._copy.close()
            self._copy = None  # Its memory is freed before the next copy takes some.
        largest = self._weights.num_bytes if level == 1 else SMALL_BYTES
        self._copy, self._copy_level = StorageCopy(self._weights.up_to(largest)), level

    def _fill_weights(self) -> None:
        assert self._copy is not None
        self._copy.restore()
        if self._level == 1:
            return
        assert self._reload is not None
        try:
            self._reload()
            self.digest = digest_of(self._steps.model)
            if self._slots is not None:
                self._slots.base_parts.refresh()
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the base's weights cannot be read again, and stay asleep: {error}. Put the checkpoint back where it "
                "was when the server started.",
                "model",
            ) from error
        except LorafleetError as error:
            raise ConfigError(f"the base's weights cannot be read again, and stay asleep: {error.message}") from error

    def _synchronize(self) -> None:
        if self._steps.device.type == "cuda":
            torch.cuda.synchronize(self._steps.device)


def _named(tags: Collection[MemoryTag]) -> str:
    return " and ".join(sorted(tags))
