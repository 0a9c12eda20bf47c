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
from lorafleet.workers.speculation.drafter import DeviceDrafts


def unread_inputs(chunks: Many[Chunk], before: DraftVerification, drafts: DeviceDrafts | None) -> UnreadInputs:
    """Queues what finds it on the device. Call it before the next step is launched.

    Args:
        before: That of the step in flight.
        drafts: Those of the chunks that the host does not know.
    """
    rows: list[int] = []
    sources: list[int] = []  # Index of the token of each of these rows: the last tokens come first, then the drafts.
    verified: list[tuple[int, int, int]] = []
    own, width = -1, 0 if drafts is None else drafts.token_WK.shape[1]
    for b, chunk in enumerate(chunks):
        count = len(chunk.drafts)
        own += chunk.num_tokens - count  # The row of the sequence's own last token.
        known = before.rows.get(chunk.sequence)
        verified.append((0, 0, 0) if known is None else (known.index, known.first, known.num_drafts))
        if known is not None:
            rows.append(own)
            sources.append(b)
        if drafts is not None and chunk.sequence in drafts.row_by_sequence:
            first = len(chunks) + drafts.row_by_sequence[chunk.sequence] * width
            rows += range(own + 1, own + 1 + count)
            sources += range(first, first + count)
        own += count
    device, num_seqs = before.drawn_B.device, len(chunks)
    packed = array_to_device(np.concatenate((np.array(verified).T.ravel(), rows, sources)).astype(np.int64), device)
    index_B, first_B, count_B = packed[: 3 * num_seqs].view(3, num_seqs)
    row_N, source_N = packed[3 * num_seqs :].view(2, -1)
    accepted_B = before.accepted_S[index_B]
    tokens = [before.drawn_B[first_B + accepted_B]]
    if drafts is not None:
        tokens.append(drafts.token_WK.ravel())
    most_short = max(num_drafts for _, _, num_drafts in verified)
    short_B = (count_B - accepted_B).clamp_(min=0) if most_short else None
    return UnreadInputs(row_N, torch.cat(tokens)[source_N], short_B, most_short)
