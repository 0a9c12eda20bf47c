"""Computes a rank's part of an adapter's changes to embedding and head.

A replaced table is divided by rows, as the base's is. Replaced rows and low-rank matrices are divided as the table
that they belong to, which is the base's if it is not replaced.
"""

# V vocabulary of the adapter · W rows of this rank, its padding included · D hidden size · R rank · N replaced rows

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.errors import AdapterTooLarge, AdapterUnsupported
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.casting import cast
from lorafleet.workers.adapters.forms import AdapterForms, VocabForm
from lorafleet.workers.tp.model_shard import ModelShard

ROWS_ALIGNMENT = 64  # rows of a replaced table on a rank, since the sampler takes rows of logits in parts


@dataclass(frozen=True, slots=True)
class VocabWeights:
    """Changes to the tokens first_token to first_token + num_tokens - 1, in a vocabulary of vocab_size."""

    vocab_size: int
    first_token: int
    num_tokens: int
    num_rows: int  # The number W.
    table_WD: Tensor | None = None  # Rows from num_tokens on are zeros.
    place_N: Tensor | None = None  # int64, replaced tokens minus first_token.
    row_ND: Tensor | None = None
    a: Tensor | None = None  # Of an embedding, A transposed; of a head, A itself, [R, D].
    b: Tensor | None = None
    scaling: float = 1.0
    bias_W: Tensor | None = None  # float32, of a head.


def vocab_dtype(lora_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the tables, which is bfloat16 for FP8 adapters."""
    return torch.bfloat16 if lora_dtype == FP8 else lora_dtype


def vocab_size_of(forms: AdapterForms) -> int | None:
    """Returns the size of the adapter's vocabulary, or None for the base's. reader.py has checked that embedding and
    head agree."""
    for form in (forms.embedding, forms.head):
        if form is not None and form.table_VD is not None:
            return form.table_VD.shape[0]
    return None


def check_vocabulary(forms: AdapterForms, base_size: int, config: LoRAConfig, name: str) -> None:
    """Raises an AdapterError if more tokens are added than allowed, or any by an activated LoRA."""
    size = vocab_size_of(forms) or base_size
    most = config.lora_extra_vocab_size
    if most is not None and size > base_size + most:
        raise AdapterTooLarge(
            f"adapter {name!r} has a vocabulary of {size} tokens, {size - base_size} more than the base's; this server "
            f"allows lora.lora_extra_vocab_size={most}. Raise or unset it, and restart."
        )
    if forms.invocation_tokens and size > base_size:
        raise AdapterUnsupported(
            f"adapter {name!r} is an activated LoRA with new tokens, which is not supported: the base processes the "
            "text before the invocation, and it does not have these tokens."
        )


def embedding_part(form: VocabForm, shard: ModelShard | None, dtype: torch.dtype) -> VocabWeights:
    return _part(form, shard, dtype, is_head=False)


def head_part(form: VocabForm, shard: ModelShard | None, dtype: torch.dtype) -> VocabWeights:
    return _part(form, shard, dtype, is_head=True)


def vocab_bytes(form: VocabForm | None, dtype: torch.dtype) -> int:
    """Returns the bytes of the whole form as served."""
    if form is None:
        return 0
    matrices = [form.table_VD, None if form.rows is None else form.rows.row_ND]
    if form.low_rank is not None:
        matrices += [form.low_rank.a_RD, form.low_rank.b_OR]
    total = sum(matrix.numel() for matrix in matrices if matrix is not None) * dtype.itemsize
    return total + (0 if form.bias_V is None else form.bias_V.numel() * torch.float32.itemsize)


def _part(form: VocabForm, shard: ModelShard | None, dtype: torch.dtype, *, is_head: bool) -> VocabWeights:
    vocab_size, own, num_rows = _place(form, shard, is_head=is_head)
    table_WD = place_N = row_ND = a = b = bias_W = None
    if form.table_VD is not None:
        table_WD = _padded(cast(form.table_VD[own], dtype), num_rows)
    if form.rows is not None:
        inside = (form.rows.token_N >= own.start) & (form.rows.token_N < own.stop)
        if inside.any():
            place_N, row_ND = form.rows.token_N[inside] - own.start, cast(form.rows.row_ND[inside], dtype)
    if form.low_rank is not None:
        low = form.low_rank
        if is_head:
            a, b = cast(low.a_RD, dtype), _padded(cast(low.b_OR[own], dtype), num_rows)
        else:
            a, b = cast(low.a_RD[:, own].T.contiguous(), dtype), cast(low.b_OR, dtype)
    if form.bias_V is not None:
        bias_W = _padded(form.bias_V[own].float(), num_rows)
    return VocabWeights(
        vocab_size,
        own.start,
        own.stop - own.start,
        num_rows,
        table_WD,
        place_N,
        row_ND,
        a,
        b,
        1.0 if form.low_rank is None else form.low_rank.scaling,
        bias_W,
    )


def _place(form: VocabForm, shard: ModelShard | None, *, is_head: bool) -> tuple[int, slice, int]:
    """Returns the vocabulary's size, this rank's tokens, and the number of rows that every rank has for them.

    `shard` is None for the whole form on an unknown base. The vocabulary is then as large as the form needs.
    """
    if shard is None:
        size = _least_size(form, is_head=is_head)
        return size, slice(0, size), size
    if form.table_VD is None:
        return shard.whole.vocab_size, shard.vocabulary, shard.vocab_per_rank
    size = form.table_VD.shape[0]
    each = -(-size // shard.size // ROWS_ALIGNMENT) * ROWS_ALIGNMENT
    start = min(shard.rank * each, size)
    return size, slice(start, min(start + each, size)), each


def _least_size(form: VocabForm, *, is_head: bool) -> int:
    sizes = [0]
    if form.table_VD is not None:
        sizes.append(form.table_VD.shape[0])
    if form.low_rank is not None:
        sizes.append(form.low_rank.b_OR.shape[0] if is_head else form.low_rank.a_RD.shape[1])
    if form.rows is not None:
        sizes.append(int(form.rows.token_N[-1]) + 1)
    return max(sizes)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    if len(x) == num_rows:
        return x.contiguous()
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, num_rows - len(x)))
