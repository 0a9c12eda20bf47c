"""Computes tokens and logprobs from logits, for all rows of a step at once. An operator runs only if a row requests
it.

Random draws are a function of (seed, position) alone, see random_numbers.py.
"""

# B rows (sequences that sample in this step) · V vocabulary · W a rank's part of it · N ranks

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.protocol.random_numbers import uniform
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.host_copy import Download, to_device
from lorafleet.workers.tp.group import TPGroup

NEVER = float("-inf")
MOST_PARTS = 64  # parts of a row of logits


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The values on which one row's draw depends."""

    params: SamplingParams
    num_tokens: int  # of prompt and answer, before the token that is chosen
    seed: int
    vocab_size: int  # of the row's own vocabulary, which may be smaller than the step's


def sample(logits_BV: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Returns one token per row, int64 [B] on the device, without waiting for it. `logits_BV` is float32, with all
    edits."""
    greedy_B = greedy(logits_BV)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if random:
        if len(random) < len(rows):
            logits_BV = logits_BV[to_device(random, torch.int64, logits_BV.device)]
        greedy_B[to_device(random, torch.int64, greedy_B.device)] = _draw(logits_BV, [rows[i] for i in random])
    return greedy_B


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

    def __init__(self, logits_BV: Tensor, chosen_B: Tensor, num_top: list[int], download: Download) -> None:
        """Queues the computation and the download. `logits_BV` are raw, before edits."""
        logprobs_BV = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        chosen_B1 = chosen_B.unsqueeze(1)
        own_B1 = logprobs_BV.gather(1, chosen_B1)
        # Ties with a smaller token id come first, as they do in topk's and argmax's order.
        ids_V = torch.arange(logprobs_BV.shape[1], device=logits_BV.device)
        ahead_BV = (logprobs_BV > own_B1) | ((logprobs_BV == own_B1) & (ids_V < chosen_B1))
        top = logprobs_BV.topk(max(num_top), dim=-1)
        columns = (chosen_B, own_B1.squeeze(1), ahead_BV.sum(-1) + 1, top.indices, top.values)
        self._columns = [download.add(column) for column in columns]
        self._num_top = num_top

    def read(self) -> list[TokenLogprobs]:
        """Returns the logprobs of each row. Call it once the download is done."""
        rows = zip(*(column.tolist() for column in self._columns), self._num_top, strict=True)
        return [TokenLogprobs(t, own, rank, ids[:n], values[:n]) for t, own, rank, ids, values, n in rows]


def _draw(logits_BV: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Returns int64 [B], drawn by the inverse of the cumulative distribution in vocabulary order."""
    device = logits_BV.device

    def column(values: list[float]) -> Tensor:
        return to_device(values, torch.float32, device).unsqueeze(1)

    logits_BV = logits_BV / column([row.params.temperature for row in rows])
    if any(row.params.min_p > 0 for row in rows):
        floor_B1 = logits_BV.amax(-1, keepdim=True) + column([row.params.min_p for row in rows]).log()
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, NEVER)
    if any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows):
        logits_BV = _keep_best(logits_BV, rows)
    cumulative_BV = logits_BV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    draw_B1 = to_device([uniform(row.seed, row.num_tokens) for row in rows], torch.float64, device).unsqueeze(1)
    target_B1 = draw_B1 * cumulative_BV[:, -1:]
    # right=True skips tokens of probability zero. The last token with any probability is the upper bound. In a row of
    # NaN, which an adapter's large values can cause, all tokens are skipped, but the token must still be one of the
    # row's vocabulary.
    found_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1)
    return found_B.minimum(to_device([row.vocab_size - 1 for row in rows], torch.int64, device))


def _keep_best(logits_BV: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Applies top_k, then top_p to what is left: the fewest best tokens that together reach top_p."""
    vocab = logits_BV.shape[1]
    device = logits_BV.device
    top_k = [row.params.top_k if row.params.top_k > 0 else vocab for row in rows]
    k_B1 = to_device(top_k, torch.int64, device).unsqueeze(1)
    p_B1 = to_device([row.params.top_p for row in rows], torch.float32, device).unsqueeze(1)
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV = sorted_BV.masked_fill(torch.arange(vocab, device=device) >= k_B1, NEVER)
    probability_BV = sorted_BV.softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    # If top_p is off, rounding in the sum must not cut the tail.
    sorted_BV = sorted_BV.masked_fill((before_BV >= p_B1) & (p_B1 < 1), NEVER)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)
