"""The Triton form of kernels/extras/slot_embedding.py: one launch per step, whatever its slots have.

Idea: a token's program reads one address; most find 0 there and end. Replaced rows are found by bisection, so that a
slot's cost depends on the number of rows that it replaces, not on the size of its vocabulary. The low-rank part reads
one row of A and its block of B.
Memory: as in SlotEmbedding. Blocks are aligned to 256 bytes.
"""

# T tokens · D hidden size · R rank

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_D = 256
BLOCK_R = 16
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit()
def _place_among(token_ptr: tl.tensor, count: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Returns the token's index among the ascending tokens, or count if it is not among them."""
    low = tl.zeros_like(count)
    high = count
    while low < high:
        middle = (low + high) // 2
        before = tl.load(token_ptr + middle) < token
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    found = tl.load(token_ptr + low, mask=low < count, other=-1)
    return tl.where(found == token, low, count)


@jit(do_not_specialize=["token_ptr", "address_ptr"])
def _slot_embedding_kernel(
    token_ptr: tl.tensor,
    address_ptr: tl.tensor,
    x_ptr: tl.tensor,
    size: tl.constexpr,
    dtype: tl.constexpr,
    block_d: tl.constexpr,
    block_r: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    address = tl.load(address_ptr + t)
    if address != 0:
        record = address.to(tl.pointer_type(tl.int64))
        place = tl.load(token_ptr + t) - tl.load(record)
        is_own = (place >= 0) & (place < tl.load(record + 1))
        table_offset = tl.load(record + 2)
        d = tl.program_id(1) * block_d + tl.arange(0, block_d)
        inside = d < size
        if is_own:
            num_rows = tl.load(record + 3)
            rank = tl.load(record + 6)
            x = tl.load(x_ptr + t * size + d, mask=inside, other=0.0).to(tl.float32)
            if table_offset != 0:
                table = (address + table_offset).to(tl.pointer_type(dtype))
                x = tl.load(table + place * size + d, mask=inside, other=0.0).to(tl.float32)
            if num_rows != 0:
                row = _place_among((address + tl.load(record + 4)).to(tl.pointer_type(tl.int64)), num_rows, place)
                if row < num_rows:
                    rows = (address + tl.load(record + 5)).to(tl.pointer_type(dtype))
                    x = tl.load(rows + row * size + d, mask=inside, other=0.0).to(tl.float32)
            if rank != 0:
                a = (address + tl.load(record + 7)).to(tl.pointer_type(dtype)) + place * rank
                b = (address + tl.load(record + 8)).to(tl.pointer_type(dtype))
                scale = tl.load((address + 9 * 8).to(tl.pointer_type(tl.float32)))
                added = tl.zeros((block_d,), dtype=tl.float32)
                for start in range(0, rank, block_r):
                    r = start + tl.arange(0, block_r)
                    a_r = tl.load(a + r, mask=r < rank, other=0.0).to(tl.float32)
                    within = inside[:, None] & (r < rank)[None, :]
                    b_dr = tl.load(b + d[:, None] * rank + r[None, :], mask=within, other=0.0).to(tl.float32)
                    added += tl.sum(b_dr * a_r[None, :], axis=1)
                x += scale * added
            tl.store(x_ptr + t * size + d, x.to(x_ptr.dtype.element_ty), mask=inside)
        elif table_offset != 0:
            zero = tl.zeros((block_d,), dtype=tl.float32)
            tl.store(x_ptr + t * size + d, zero.to(x_ptr.dtype.element_ty), mask=inside)


def slot_embedding_triton(token_T: Tensor, x_TD: Tensor, address_T: Tensor, dtype: torch.dtype) -> None:
    """Replaces base embeddings by the slots' own in x_TD in place.

    address_T is int64: the address of each token's record, or 0 if there is none. `dtype` is that of the records'
    tensors.
    """
    num_tokens, size = x_TD.shape
    assert token_T.shape == address_T.shape == (num_tokens,) and address_T.is_contiguous() and token_T.is_contiguous()
    _slot_embedding_kernel[(num_tokens, triton.cdiv(size, BLOCK_D))](
        token_T,
        address_T,
        x_TD,
        size=size,
        dtype=TYPES[dtype],
        block_d=min(BLOCK_D, triton.next_power_of_2(size)),
        block_r=BLOCK_R,
        num_warps=4,
    )
