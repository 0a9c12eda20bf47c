"""Chooses a token for each row of logits: penalties, temperature, min_p, top_k, top_p, and the draw.

On CUDA it is one launch of kernels/sampling/draw_tokens_triton.py. Here is its twin for a CPU, which sorts.

A token's chance depends on its row alone, and the draw is a number in [0, 1) that the caller gives: the token is the
first whose cumulative probability, in the order of the vocabulary, exceeds it.
"""

# B rows of logits · V vocabulary · F fields of a row · S rows of counts · P rows whose logprobs are wanted

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.sampling.penalties import penalize

NEVER = float("-inf")
NO_COUNTS = -1


class DrawFields(NamedTuple):
    """The values on which one row's token depends. The order of the fields is that of the kernel's table."""

    temperature: float  # 0 takes the best token.
    top_k: int  # The number of best tokens that are kept. All are kept if the vocabulary has no more.
    top_p: float  # The fewest best tokens are kept that together reach this part of the probability.
    log_min_p: float  # Logarithm of the least probability relative to the best token's; -inf keeps all.
    draw: float  # In [0, 1), with 53 bits.
    last_token: int  # The largest token of the row's own vocabulary.
    counts_row: int = NO_COUNTS  # Row of the token counts from which penalties are computed.
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


DRAW = DrawFields._fields.index("draw")
COUNTS_ROW = DrawFields._fields.index("counts_row")
NUM_FIELDS = len(DrawFields._fields)
DrawTable = np.ndarray[tuple[int, int], np.dtype[np.float64]]  # [B, F], the fields of a row as in DrawFields


class Drawn(NamedTuple):
    """The tokens of a step, on the device."""

    token_B: Tensor  # int64
    # float32 logarithms of the probabilities with which the tokens of the wanted rows were drawn: -inf for tokens that
    # were not kept. The temperature of rows that take the best token counts as 1.
    logprobs_PV: Tensor | None


def draw_tokens(
    logits_BV: Tensor,
    table_BF: DrawTable,
    counts_SV: Tensor,
    wanted: Sequence[int] = (),
    draw_B: Tensor | None = None,
) -> Drawn:
    """Chooses one token per row, without waiting for the device.

    Args:
        table_BF: float64, the DrawFields of each row.
        logits_BV: float32, bfloat16 or float16. float32 logits may be overwritten.
        counts_SV: int32, how often the tokens of sequences occur, see penalties.py. Its vocabulary may be wider or
            narrower than the logits'.
        wanted: Rows whose logprobs are wanted.
        draw_B: float64, on the logits' device: takes the place of the table's draws.
    """
    if logits_BV.is_cuda:
        from lorafleet.kernels.sampling.draw_tokens_triton import draw_tokens_triton  # triton is optional on a CPU

        device_BF = torch.from_numpy(table_BF).pin_memory().to(logits_BV.device, non_blocking=True)
        if draw_B is not None:
            device_BF[:, DRAW] = draw_B
        penalizes = bool((table_BF[:, COUNTS_ROW] != NO_COUNTS).any())
        token_B, bounds = draw_tokens_triton(logits_BV, device_BF, counts_SV, penalizes=penalizes)
        return Drawn(token_B, bounds.logprobs(wanted) if wanted else None)
    if draw_B is not None:
        table_BF = table_BF.copy()
        table_BF[:, DRAW] = draw_B.numpy()
    logits_BV = logits_BV.float()
    rows = [_fields(row) for row in table_BF.tolist()]
    for i, row in enumerate(rows):
        if row.counts_row != NO_COUNTS:
            penalize(logits_BV[i], counts_SV[row.counts_row], row.repetition, row.presence, row.frequency)
    # A maximum counts NaN, which an adapter's large values can cause, as the largest, and may be beyond the vocabulary.
    last_B = torch.tensor([row.last_token for row in rows])
    token_B = logits_BV.argmax(dim=-1).minimum(last_B)
    random = [i for i, row in enumerate(rows) if row.temperature > 0]
    if random:
        kept_BV = _kept(logits_BV[random], [rows[i] for i in random])
        token_B[random] = _draw(kept_BV, [rows[i] for i in random]).minimum(last_B[random])
        if wanted:
            logits_BV[random] = kept_BV
    return Drawn(token_B, logits_BV[list(wanted)].log_softmax(dim=-1) if wanted else None)


def warm_up(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernel's variants on CUDA, so that no request waits for a compiler. `dtype` is that of the logits
    without biases."""
    plain = DrawFields(1.0, vocab_size, 1.0, NEVER, 0.0, vocab_size - 1)
    for logits_dtype, row in product((dtype, torch.float32), (plain, plain._replace(counts_row=0))):
        logits_BV = torch.zeros((1, vocab_size), dtype=logits_dtype, device=device)
        draw_tokens(logits_BV, np.array([row]), torch.zeros((1, vocab_size), dtype=torch.int32, device=device))


def _fields(row: list[float]) -> DrawFields:
    """Returns a row of the table with its integers as such."""
    fields = DrawFields._make(row)
    return fields._replace(
        top_k=int(fields.top_k), last_token=int(fields.last_token), counts_row=int(fields.counts_row)
    )


def _kept(logits_BV: Tensor, rows: list[DrawFields]) -> Tensor:
    """Returns the logits at the rows' temperatures; -inf for tokens that are not kept."""
    # The best token's logit is subtracted first, so that no temperature is so low that the logits overflow.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) * (1 / _column([row.temperature for row in rows]))
    if any(row.log_min_p > NEVER for row in rows):
        logits_BV = logits_BV.masked_fill(logits_BV < _column([row.log_min_p for row in rows]), NEVER)
    if any(row.top_k < logits_BV.shape[1] or row.top_p < 1 for row in rows):
        logits_BV = _keep_best(logits_BV, rows)
    return logits_BV


def _draw(logits_BV: Tensor, rows: list[DrawFields]) -> Tensor:
    cumulative_BV = logits_BV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    draw_B1 = torch.tensor([row.draw for row in rows], dtype=torch.float64).unsqueeze(1)
    # right=True skips tokens of probability zero. In a row of NaN all tokens are skipped.
    return torch.searchsorted(cumulative_BV, draw_B1 * cumulative_BV[:, -1:], right=True).squeeze(1)


def _keep_best(logits_BV: Tensor, rows: list[DrawFields]) -> Tensor:
    """Applies top_k, then top_p to what is left. Of equal tokens the first are kept."""
    k_B1 = _column([row.top_k for row in rows])
    p_B1 = _column([row.top_p for row in rows])
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV = sorted_BV.masked_fill(torch.arange(logits_BV.shape[1]) >= k_B1, NEVER)
    probability_BV = sorted_BV.softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    # If top_p is off, rounding in the sum must not cut the tail.
    sorted_BV = sorted_BV.masked_fill((before_BV >= p_B1) & (p_B1 < 1), NEVER)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)


def _column(values: list[float] | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)
