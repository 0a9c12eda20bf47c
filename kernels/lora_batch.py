"""Which adapter slot each token of one step uses, in the forms that the kernels read.

Built once a step on the host, shared by every layer. A static batch keeps its device memory from step to step, so that
a captured CUDA graph serves any mix. Knows nothing of weights: kernels/packed_lora.py has those.
"""

# T tokens in the step · K tiles · S slots in the step

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BASE_SLOT = -1  # in slot lists: this token uses the base model alone
CHUNK_RANKS = 16  # ranks that the kernels take at a time: tl.dot's least K
# Tokens of one slot that one Triton program takes. 16 is tl.dot's least M; where a step holds long prompts, larger
# tiles read A and B less often.
TILE_TOKENS = 16
PREFILL_TILE_TOKENS = 64
PREFILL_TOKENS = 1024  # a step of so many tokens takes the larger tiles
NUM_PINNED = 4  # host buffers of a static batch: how many steps may be queued before fill() waits


def tile_tokens_of(num_tokens: int) -> int:
    return PREFILL_TILE_TOKENS if num_tokens >= PREFILL_TOKENS else TILE_TOKENS


def round_to_chunk(ranks: int) -> int:
    return -(-ranks // CHUNK_RANKS) * CHUNK_RANKS


class DevicePlan:
    """What the Triton kernels read, views of one int32 buffer, so that a step costs one copy.

    order_T: tokens sorted by slot, stable, base tokens last. tiles_K3: rows (slot, start in order_T, length), in
    order; length 0 beyond the step's own.
    """

    def __init__(self, buffer: Tensor, num_tokens: int, num_tiles: int) -> None:
        self.buffer = buffer
        self.order_T = buffer[:num_tokens]
        self.tiles_K3 = buffer[num_tokens:].view(num_tiles, 3)

    @staticmethod
    def size(num_tokens: int, num_tiles: int) -> int:
        return num_tokens + 3 * num_tiles


@dataclass(slots=True)
class LoRABatch:
    """Tokens grouped by slot. Host fields serve the torch twin, `plan` the Triton kernels.

    slots: the distinct slots of the step, ascending. spans: for each, its [start, end) in order_T.
    order_T: int64 on the host; active_T: int64, index into `slots`, N for base tokens. max_rank: the largest rank that
    a static batch may meet, None where the slots themselves say it.
    """

    num_tokens: int
    slots: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    order_T: Tensor
    active_T: Tensor
    plan: DevicePlan
    tile_tokens: int
    max_rank: int | None = None
    side_stream: torch.cuda.Stream | None = None
    _pinned: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)

    @classmethod
    def build(cls, slot_of_token: Sequence[int], device: torch.device) -> LoRABatch | None:
        """None when no token uses an adapter: such a step runs no LoRA kernel."""
        tile_tokens = tile_tokens_of(len(slot_of_token))
        step = _Step.of(slot_of_token, tile_tokens)
        if step is None:
            return None
        sizes = len(slot_of_token), len(step.tiles_K3)
        host = torch.zeros(DevicePlan.size(*sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        step.write(DevicePlan(host, *sizes))
        return cls(
            num_tokens=len(slot_of_token),
            slots=step.slots,
            spans=step.spans,
            order_T=torch.from_numpy(step.order_T),
            active_T=torch.from_numpy(step.active_T),
            plan=DevicePlan(host.to(device, non_blocking=True), *sizes),
            tile_tokens=tile_tokens,
            side_stream=_side_stream(device),
        )

    @classmethod
    def static(cls, num_tokens: int, num_slots: int, max_rank: int, device: torch.device) -> LoRABatch:
        """A batch whose device memory never moves, for a CUDA graph of `num_tokens` tokens. Empty until fill()."""
        tile_tokens = tile_tokens_of(num_tokens)
        sizes = num_tokens, min(num_tokens, num_slots + num_tokens // tile_tokens)
        cuda = device.type == "cuda"
        size = DevicePlan.size(*sizes)
        batch = cls(
            num_tokens=num_tokens,
            slots=(),
            spans=(),
            order_T=torch.arange(num_tokens),
            active_T=torch.zeros(num_tokens, dtype=torch.int64),
            plan=DevicePlan(torch.zeros(size, dtype=torch.int32, device=device), *sizes),
            tile_tokens=tile_tokens,
            max_rank=max_rank,
            side_stream=_side_stream(device),
        )
        if cuda:
            batch._pinned = [
                (torch.zeros(size, dtype=torch.int32, pin_memory=True), torch.cuda.Event()) for _ in range(NUM_PINNED)
            ]
        batch.plan.order_T.copy_(batch.order_T)
        return batch

    def fill(self, slot_of_token: Sequence[int], rank_of_slot: Sequence[int]) -> None:
        """The next step's slots, one copy on the current stream; missing tokens are padding and take no adapter.

        rank_of_slot: each slot's largest rank over all modules.
        """
        assert max(rank_of_slot, default=0) <= (self.max_rank or 0), "P has no room for such a rank"
        assert self.max_rank is not None, "only a static batch is filled"
        assert len(slot_of_token) <= self.num_tokens
        padded = [*slot_of_token, *[BASE_SLOT] * (self.num_tokens - len(slot_of_token))]
        plan = self.plan
        sizes = self.num_tokens, plan.tiles_K3.shape[0]
        if not self._pinned:
            host = torch.zeros(DevicePlan.size(*sizes), dtype=torch.int32)
        else:
            host, copied = self._pinned.pop(0)
            copied.synchronize()
            self._pinned.append((host, copied))
            host.zero_()
        step = _Step.of(padded, self.tile_tokens)
        if step is None:
            DevicePlan(host, *sizes).order_T.copy_(torch.arange(self.num_tokens))
            self.slots, self.spans = (), ()
        else:
            step.write(DevicePlan(host, *sizes))
            self.slots, self.spans = step.slots, step.spans
            self.order_T, self.active_T = torch.from_numpy(step.order_T), torch.from_numpy(step.active_T)
        plan.buffer.copy_(host, non_blocking=True)
        if self._pinned:
            self._pinned[-1][1].record()


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """From torch's own pool of streams: making one costs nothing."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's grouping, exact sizes, on the host."""

    slots: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    order_T: Ints
    active_T: Ints
    tiles_K3: Ints

    @classmethod
    def of(cls, slot_of_token: Sequence[int], tile_tokens: int) -> _Step | None:
        slot_T = np.asarray(slot_of_token, dtype=np.int64)
        slot_S, active_T, count_S = np.unique(slot_T, return_inverse=True, return_counts=True)
        num_base = int(count_S[0]) if slot_S[0] == BASE_SLOT else 0
        if num_base == len(slot_T):
            return None
        if num_base:
            slot_S, count_S, active_T = slot_S[1:], count_S[1:], active_T - 1
            active_T = np.where(active_T < 0, len(slot_S), active_T)
        end_S = np.cumsum(count_S)
        start_S = end_S - count_S
        tiles_S = -(-count_S // tile_tokens)
        at_K = start_S.repeat(tiles_S) + _counting(tiles_S) * tile_tokens
        tiles_K3 = np.stack(
            [slot_S.repeat(tiles_S), at_K, np.minimum(end_S.repeat(tiles_S) - at_K, tile_tokens)], axis=1
        )
        return cls(
            slots=tuple(slot_S.tolist()),
            spans=tuple(zip(start_S.tolist(), end_S.tolist(), strict=True)),
            order_T=np.argsort(active_T, kind="stable"),
            active_T=active_T,
            tiles_K3=tiles_K3,
        )

    def write(self, plan: DevicePlan) -> None:
        """Into zeroed host memory; what is beyond this step's own stays zero."""
        plan.order_T.numpy()[:] = self.order_T
        plan.tiles_K3.numpy()[: len(self.tiles_K3)] = self.tiles_K3


def _counting(counts: Ints) -> Ints:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    counting: Ints = np.arange(ends[-1]) - (ends - counts).repeat(counts)
    return counting
