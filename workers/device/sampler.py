"""Computes greedy tokens and logprobs from logits, for all rows of a step at once."""

# B rows (tokens that are chosen in this step) · V vocabulary · W a rank's part of it · N ranks

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.workers.device.host_copy import Download
from lorafleet.workers.tp.group import TPGroup

MOST_PARTS = 64  # parts of a row of logits


def greedy(logits_BV: Tensor) -> Tensor:
    """Returns the first of the largest logits, int64 [B].

    Works in two steps, since argmax assigns few threads to a row: it takes 28 us for one.
    """
    num_rows, vocab = logits_BV.shape
    parts = next(parts for parts in range(MOST_PARTS, 0, -1) if vocab % parts == 0)
    best_BP, index_BP = logits_BV.view(num_rows, parts, -1).max(dim=-1)
    part_B1 = best_BP.argmax(dim=-1, keepdim=True)
    return torch.add(index_BP.gather(1, part_B1), part_B1, alpha=vocab // parts).squeeze(1)


def greedy_of_ranks(logits_BW: Tensor, group: TPGroup) -> Tensor:
    """Returns greedy() of the whole vocabulary from each rank's own columns (DecoderModel.logits): int64 [B], on all
    ranks.

    The ranks exchange only their best logit and its token. float64 holds both exactly.
    """
    column_B = greedy(logits_BW)
    if group.size == 1:
        return column_B
    best_B = logits_BW.gather(1, column_B.unsqueeze(1)).squeeze(1)
    token_B = column_B + group.rank * logits_BW.shape[1]
    best_NB, token_NB = group.all_gather(torch.stack((best_B.double(), token_B.double()))).unbind(1)
    # The first of the largest is the lowest rank's, whose tokens come first.
    return token_NB.gather(0, best_NB.argmax(dim=0, keepdim=True)).squeeze(0).long()


class PendingLogprobs:
    """Logprobs on their way to the host: the chosen token's, and those of the num_top best tokens of each row."""

    def __init__(self, logprobs_BV: Tensor, chosen_B: Tensor, num_top: list[int], download: Download) -> None:
        """Queues the computation and the download. `logprobs_BV` are float32."""
        chosen_B1 = chosen_B.unsqueeze(1)
        own_B1 = logprobs_BV.gather(1, chosen_B1)
        # Ties with a smaller token id come first, as they do in topk's and argmax's order.
        ids_V = torch.arange(logprobs_BV.shape[1], device=logprobs_BV.device)
        ahead_BV = (logprobs_BV > own_B1) | ((logprobs_BV == own_B1) & (ids_V < chosen_B1))
        top = logprobs_BV.topk(max(num_top), dim=-1)
        columns = (chosen_B, own_B1.squeeze(1), ahead_BV.sum(-1) + 1, top.indices, top.values)
        self._columns = [download.add(column) for column in columns]
        self._num_top = num_top

    def read(self) -> list[TokenLogprobs]:
        """Returns the logprobs of each row. Call it once the download is done."""
        rows = zip(*(column.tolist() for column in self._columns), self._num_top, strict=True)
        return [TokenLogprobs(t, own, rank, ids[:n], values[:n]) for t, own, rank, ids, values, n in rows]
