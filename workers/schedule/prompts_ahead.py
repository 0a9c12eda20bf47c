"""Says whether the next step should compute prompts, before it is scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorafleet.workers.schedule.scheduler import Scheduler
    from lorafleet.workers.schedule.sequence import Sequence


def computes_prompts(scheduler: Scheduler) -> bool:
    """Returns whether a running sequence has prompt tokens left, or a waiting one has room to start."""
    if any(sequence.num_uncomputed > 1 and sequence.arrival is None for sequence in scheduler.running):
        return True
    if scheduler.pause or len(scheduler.running) >= scheduler.max_num_seqs:
        return False
    return bool(scheduler.waiting) and any(_may_start(scheduler, head) for head in scheduler.waiting.heads())


def _may_start(scheduler: Scheduler, sequence: Sequence) -> bool:
    loras = scheduler.loras
    has_adapter = sequence.lora is None or (loras is not None and sequence.digest in loras.slots.usable_digests)
    return has_adapter and scheduler.memory.may_take(sequence, scheduler.running)
