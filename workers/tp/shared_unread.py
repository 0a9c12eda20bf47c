"""Gives the other ranks what a planned step lacks since only the devices know it (workers/device/unread_inputs.py).

Rank 0 broadcasts these numbers behind its order to run the step, so no host waits for them. All ranks have drawn the
same tokens, and could count the accepted drafts themselves. But they would need to know which rows belong to which
sequence, and a draft model's tokens are on the first GPU alone. One small collective is less work, and exact as well.
"""

# T tokens of the step · N of them that the hosts do not know · B sequences

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.tp.group import TPGroup


class SentUnread(msgspec.Struct):
    """The sizes of what share_unread() sends. They are a part of the order to run the step."""

    num_unknown: int  # N
    num_short: int  # B, or 0 if no sequence may be shorter than planned.
    most_short: int  # As in UnreadInputs.
    num_sources: int = 0  # T if the step is a head's, whose features only the devices know; otherwise 0.

    @classmethod
    def of(cls, unread: UnreadInputs, source_T: Tensor | None = None) -> SentUnread:
        num_short = 0 if unread.short_B is None else len(unread.short_B)
        num_sources = 0 if source_T is None else len(source_T)
        return cls(len(unread.row_N), num_short, unread.most_short, num_sources)


def share_unread(
    group: TPGroup,
    sent: SentUnread,
    device: torch.device,
    unread: UnreadInputs | None = None,
    source_T: Tensor | None = None,
) -> tuple[UnreadInputs, Tensor | None]:
    """Queues the broadcast of these numbers. Returns what the plan lacks, and the rows of a head's features.

    Args:
        unread: On rank 0, what it sends. None on the others.
        source_T: As in DraftSteps.run, likewise.
    """
    sizes = [sent.num_unknown, sent.num_unknown, sent.num_short, sent.num_sources]
    if unread is None:
        numbers = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    else:
        none = unread.row_N.new_empty(0)
        parts = (unread.row_N, unread.token_N, unread.short_B, source_T)
        numbers = torch.cat([none if part is None else part for part in parts])
    row_N, token_N, short_B, sources_T = group.broadcast(numbers).split(sizes)
    shared = UnreadInputs(row_N, token_N, short_B if sent.num_short else None, sent.most_short)
    return shared, sources_T if sent.num_sources else None
