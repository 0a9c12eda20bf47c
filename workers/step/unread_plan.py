"""Finds what the plan of a step lacks, since the step before verifies drafts and the host has not read what it found.

The step is planned as if all of these drafts were accepted.
"""

# B sequences of the step · N tokens that the host does not know · K draft tokens

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.device.host_copy import array_to_device
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.schedule.sequence import Chunk
from lorafleet.workers.speculation.awaited_drafts import AwaitedDrafts, UnknownDrafts


@torch.inference_mode()
def unread_inputs(chunks: Many[Chunk], before: DraftVerification, drafts: UnknownDrafts | None) -> UnreadInputs:
    """Queues what finds it on the device. Call it before the next step is launched. If the host makes the drafts, the
    tokens are not among it.

    Args:
        before: That of the step in flight.
        drafts: Those of the chunks that the host does not know.
    """
    rows: list[int] = []
    sources: list[int] = []  # Index of the token of each of these rows: the last tokens come first, then the drafts.
    verified: list[tuple[int, int, int]] = []
    on_device = None if isinstance(drafts, AwaitedDrafts) else drafts
    own, width = -1, 0 if on_device is None else on_device.token_WK.shape[1]
    for b, chunk in enumerate(chunks):
        count = len(chunk.drafts)
        own += chunk.num_tokens - count  # The row of the sequence's own last token.
        known = before.rows.get(chunk.sequence)
        verified.append((0, 0, 0) if known is None else (known.index, known.first, known.num_drafts))
        if known is not None:
            rows.append(own)
            sources.append(b)  # Not read if the host makes the drafts.
        if drafts is not None and chunk.sequence in drafts.counts:
            rows += range(own + 1, own + 1 + count)
            if on_device is not None:
                first = len(chunks) + on_device.row_by_sequence[chunk.sequence] * width
                sources += range(first, first + count)
        own += count
    device, num_seqs = before.drawn_B.device, len(chunks)
    packed = array_to_device(np.concatenate((np.array(verified).T.ravel(), rows, sources)).astype(np.int64), device)
    index_B, first_B, count_B = packed[: 3 * num_seqs].view(3, num_seqs)
    row_N = packed[3 * num_seqs : 3 * num_seqs + len(rows)]
    accepted_B = before.accepted_S[index_B]
    most_short = max(num_drafts for _, _, num_drafts in verified)
    short_B = (count_B - accepted_B).clamp_(min=0) if most_short else None
    if isinstance(drafts, AwaitedDrafts):
        return UnreadInputs(row_N, None, short_B, most_short)
    tokens = [before.drawn_B[first_B + accepted_B]]
    if on_device is not None:
        tokens.append(on_device.token_WK.ravel())
    return UnreadInputs(row_N, torch.cat(tokens)[packed[3 * num_seqs + len(rows) :]], short_B, most_short)
