"""The adapter slot that each token of one step uses, in the forms that the kernels read.

A batch is built once per step on the host and shared by every layer. A static batch has the same device memory in
every step, so that a captured CUDA graph serves any mix. A batch knows the addresses of weights, but not their content
(kernels/lora/step_addresses.py).
"""

# T tokens in the step · K tiles · S slots in the step

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.extras.extra_tables import ExtraTables
from lorafleet.kernels.lora.lora_tuning import FEW_TILES, SOME_TILES, tuning_for
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.kernels.lora.sm_split import UNSPLIT, SMSplit
from lorafleet.kernels.lora.step_addresses import StepAddresses

BASE_SLOT = -1  # in lists of slots: this token uses the base model alone
CHUNK_RANKS = 16  # ranks that the kernels process at a time: tl.dot's smallest K
# Tokens of one slot that one Triton program takes. 16 is tl.dot's smallest M. If a step has long prompts, larger tiles
# read A and B less often.
TILE_TOKENS = 16
PREFILL_TILE_TOKENS = 64
PREFILL_TOKENS = 512  # a step with prompts and at least this many tokens uses the larger tiles
NUM_PINNED = 4  # host buffers of a static batch: the number of steps that may be queued before fill() waits


def prompt_tile_tokens(num_tokens: int) -> int:
    """Returns the number of tokens in a tile of a step with prompts.

    A step of decodes alone uses TILE_TOKENS, however many there are: they share few slots.
    """
    return PREFILL_TILE_TOKENS if num_tokens >= PREFILL_TOKENS else TILE_TOKENS


def static_tile_counts(num_tokens: int, num_slots: int, tile_tokens: int = TILE_TOKENS) -> list[int]:
    """Returns the tile counts of the static batches for this many tokens, ascending; the last has room for any mix.

    Empty tiles cost their programs' launch, so a step with few adapters should have a batch of its own.
    """
    groups = num_slots + 1  # base tokens need tiles too
    most = min(num_tokens, groups + num_tokens // tile_tokens)
    fewest = -(-num_tokens // tile_tokens)
    return [*(count for count in (FEW_TILES, SOME_TILES) if fewest <= count < most), most]


def count_tiles(slot_of_token: Sequence[int], num_tokens: int, tile_tokens: int = TILE_TOKENS) -> int:
    """Returns the number of tiles of a step that is padded with base tokens to num_tokens."""
    counts = Counter(slot_of_token)
    counts[BASE_SLOT] += num_tokens - len(slot_of_token)
    return sum(-(-count // tile_tokens) for count in counts.values())


class DevicePlan:
    """The inputs of the Triton kernels, as views of one int32 buffer, so that a step costs one copy."""

    def __init__(self, buffer: Tensor, num_tiles: int, tile_tokens: int) -> None:
        self.buffer = buffer
        end = num_tiles * (1 + tile_tokens)
        self.slot_K = buffer[:num_tiles]  # each tile's slot; BASE_SLOT for base tokens' tiles and for empty tiles
        self.tokens_KM = buffer[num_tiles:end].view(num_tiles, tile_tokens)  # each tile's tokens, then -1
        num_tokens = (len(buffer) - end) // 2
        self.slot_T = buffer[end : end + num_tokens]  # each token's slot, or BASE_SLOT
        self.order_T = buffer[end + num_tokens :]  # the tokens in the order of their slots; base tokens last

    @staticmethod
    def size(num_tokens: int, num_tiles: int, tile_tokens: int) -> int:
        return num_tiles * (1 + tile_tokens) + 2 * num_tokens


class LoRABatch:
    """A step's tokens, grouped by slot.

    The torch twin uses the host's fields; the Triton kernels use `plan` and `addresses`. If max_rank is set, the
    launches are those of any mix with ranks up to it. If it is None, they are the smallest that the slots themselves
    need.
    """

    def __init__(
        self,
        num_tokens: int,
        num_tiles: int,
        tile_tokens: int,
        plan_buffer: Tensor,
        tables: LoRATables,
        max_rank: int | None,
        takes_rare: bool | None = None,
    ) -> None:
        device = plan_buffer.device
        self.num_tokens = num_tokens
        self.tile_tokens = tile_tokens
        self.max_rank = max_rank
        self._takes_rare = takes_rare
        self.plan = DevicePlan(plan_buffer, num_tiles, self.tile_tokens)
        self.addresses = StepAddresses(tables, self.plan.slot_K, self.plan.slot_T)
        self.tuning = tuning_for(device, num_tiles, self.is_prefill)
        # It comes from torch's own pool of streams, so it costs nothing.
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.split = UNSPLIT
        self.slots: tuple[int, ...] = ()  # the distinct slots of the step, ascending
        self.spans: tuple[tuple[int, int], ...] = ()  # for each slot, its [start, end) in order_T
        self.order_T = torch.empty(0, dtype=torch.int64)  # the tokens in the order of their slots, on the host
        self.active_T = torch.empty(0, dtype=torch.int64)  # each token's index into `slots`, len(slots) for the base
        self.has_experts = False  # whether adapters on experts are launched
        # A static batch's host buffers, the one that was filled last at the end, and the events of their copies.
        self._hosts: list[tuple[Tensor, torch.cuda.Event | None]] = []

    @property
    def num_tiles(self) -> int:
        return len(self.plan.slot_K)

    @property
    def is_prefill(self) -> bool:
        return self.tile_tokens == PREFILL_TILE_TOKENS

    @property
    def has_kronecker(self) -> bool:
        """Whether Kronecker products are launched. For a static batch, this does not depend on its content."""
        if self._takes_rare is not None:
            return self._takes_rare
        return not self.extras.kronecker_slots.isdisjoint(self.slots)

    @property
    def has_ropes(self) -> bool:
        """Whether each token's angles are looked up by its slot. For a static batch, this does not depend on its
        content."""
        if self._takes_rare is not None:
            return self._takes_rare
        return not self.extras.rope_slots.isdisjoint(self.slots)

    @property
    def extras(self) -> ExtraTables:
        return self.addresses.extras

    @classmethod
    def build(
        cls,
        slot_of_token: Sequence[int],
        tables: LoRATables,
        max_rank: int | None = None,
        tile_tokens: int = TILE_TOKENS,
        any_slots: bool = False,
    ) -> LoRABatch | None:
        """Builds the batch of one step. Returns None if no token uses an adapter: such a step runs no LoRA kernel.

        If any_slots is true, the batch also launches what other adapters in these slots would need.
        """
        step = _Step.of(slot_of_token, tile_tokens)
        if not step.slots:
            return None
        device = tables.rank_LSP.device
        num_tiles = len(step.slot_K)
        size = DevicePlan.size(len(slot_of_token), num_tiles, tile_tokens)
        host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        step.write(DevicePlan(host, num_tiles, tile_tokens))
        buffer = host.to(device, non_blocking=True)
        batch = cls(len(slot_of_token), num_tiles, tile_tokens, buffer, tables, max_rank)
        batch._take(step)
        batch.has_experts = any_slots or batch.extras.has_experts(batch.slots)
        return batch

    @classmethod
    def static(
        cls,
        num_tokens: int,
        num_tiles: int,
        max_rank: int,
        tables: LoRATables,
        tile_tokens: int = TILE_TOKENS,
        takes_rare: bool = False,
        takes_experts: bool = False,
    ) -> LoRABatch:
        """Makes a batch whose device memory never moves, for a CUDA graph of num_tokens tokens.

        All of them are base tokens until fill(). num_tiles is one of static_tile_counts. takes_rare says whether
        the batch's slots may have what ExtraTables.has_rare names, and takes_experts whether their adapters may be on
        experts.
        """
        size = DevicePlan.size(num_tokens, num_tiles, tile_tokens)
        buffer = torch.zeros(size, dtype=torch.int32, device=tables.rank_LSP.device)
        batch = cls(num_tokens, num_tiles, tile_tokens, buffer, tables, max_rank, takes_rare)
        batch.has_experts = takes_experts
        batch._hosts = [
            (
                torch.zeros(size, dtype=torch.int32, pin_memory=buffer.is_cuda),
                torch.cuda.Event() if buffer.is_cuda else None,
            )
            for _ in range(NUM_PINNED if buffer.is_cuda else 1)
        ]
        batch.fill([], [])
        return batch

    def run_beside(self, split: SMSplit, side_stream: torch.cuda.Stream) -> None:
        """Sets the stream of the LoRA kernels, and their share of the GPU beside the base GEMMs.

        The side stream must have split.lora_priority, and the stream that the step is captured on split.gemm_priority.
        """
        self.split, self.side_stream = split, side_stream

    def fill(self, slot_of_token: Sequence[int], rank_of_slot: Sequence[int]) -> None:
        """Sets the next step's slots, with one copy on the current stream.

        Missing tokens are padding without an adapter. rank_of_slot is each slot's largest rank over all modules. If the
        slots are those of the last step, as in most steps of decodes, nothing is copied.
        """
        assert self.max_rank is not None, "only a static batch is filled"
        assert max(rank_of_slot, default=0) <= self.max_rank, "P has no room for such a rank"
        assert self._takes_rare or not self.extras.has_rare(slot_of_token), "it does not launch what they need"
        assert self.has_experts or not self.extras.has_experts(slot_of_token), "it launches nothing for experts"
        assert len(slot_of_token) <= self.num_tokens
        slots = [*slot_of_token, *[BASE_SLOT] * (self.num_tokens - len(slot_of_token))]
        last = DevicePlan(self._hosts[-1][0], self.num_tiles, self.tile_tokens)
        if np.array_equal(last.slot_T.numpy(), slots):
            return
        step = _Step.of(slots, self.tile_tokens)
        host, copied = self._hosts.pop(0)
        if copied is not None:
            copied.synchronize()
        self._hosts.append((host, copied))
        step.write(DevicePlan(host, self.num_tiles, self.tile_tokens))
        self._take(step)
        self.plan.buffer.copy_(host, non_blocking=True)
        if copied is not None:
            copied.record()

    def begin(self) -> None:
        """Looks up the addresses of the step's adapters, once, before the first linear.

        A captured graph repeats the look-up. On a CPU this does nothing: the torch twin has the matrices themselves.
        """
        if self.plan.buffer.is_cuda:
            self.addresses.look_up()

    def _take(self, step: _Step) -> None:
        self.slots, self.spans = step.slots, step.spans
        self.order_T, self.active_T = torch.from_numpy(step.order_T), torch.from_numpy(step.active_T)


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's grouping on the host, in exact sizes."""

    slots: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    order_T: Ints
    active_T: Ints
    slot_K: Ints
    tokens_KM: Ints  # each tile's tokens, then -1
    slot_T: Ints

    @classmethod
    def of(cls, slot_of_token: Sequence[int], tile_tokens: int) -> _Step:
        slot_T = np.asarray(slot_of_token, dtype=np.int64)
        last = np.iinfo(np.int64).max
        key_S, active_T, count_S = np.unique(
            np.where(slot_T == BASE_SLOT, last, slot_T), return_inverse=True, return_counts=True
        )
        slot_S = np.where(key_S == last, BASE_SLOT, key_S)
        order_T = np.argsort(active_T, kind="stable")
        end_S = np.cumsum(count_S)
        start_S = end_S - count_S
        tiles_S = -(-count_S // tile_tokens)
        start_K = start_S.repeat(tiles_S) + _counting(tiles_S) * tile_tokens
        at_KM = start_K[:, None] + np.arange(tile_tokens)
        inside_KM = at_KM < end_S.repeat(tiles_S)[:, None]
        adapters = len(slot_S) - int(slot_S[-1] == BASE_SLOT)
        return cls(
            slots=tuple(slot_S[:adapters].tolist()),
            spans=tuple(zip(start_S[:adapters].tolist(), end_S[:adapters].tolist(), strict=True)),
            order_T=order_T,
            active_T=active_T,
            slot_K=slot_S.repeat(tiles_S),
            tokens_KM=np.where(inside_KM, order_T[np.minimum(at_KM, len(order_T) - 1)], -1),
            slot_T=slot_T,
        )

    def write(self, plan: DevicePlan) -> None:
        """Writes the grouping into the plan. Tiles beyond the step's own are empty."""
        used = len(self.slot_K)
        assert used <= len(plan.slot_K), "the batch has no room for this mix"
        plan.slot_K.numpy()[:used] = self.slot_K
        plan.tokens_KM.numpy()[:used] = self.tokens_KM
        plan.slot_T.numpy()[:] = self.slot_T
        plan.order_T.numpy()[:] = self.order_T
        plan.slot_K.numpy()[used:] = BASE_SLOT
        plan.tokens_KM.numpy()[used:] = -1


def _counting(counts: Ints) -> Ints:
    """Counts up from 0 within each count: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    counting: Ints = np.arange(ends[-1]) - (ends - counts).repeat(counts)
    return counting
