"""The look-up of kernels/extras/extra_tables.py as one launch per step. One program takes one row and BLOCK_T tokens.

If each reader looked up slot -> address -> vector, it would wait for memory once more.
"""

# V rows · S slots · T tokens

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_T = 256


# A new number of tokens must never wait for a compiler.
@jit(do_not_specialize=["slot_ptr", "num_tokens"])
def _by_token_kernel(
    slot_ptr: tl.tensor,
    address_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_slots: tl.constexpr,
    block_t: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    slot = tl.load(slot_ptr + t, mask=t < num_tokens, other=-1)
    address = tl.load(address_ptr + row * num_slots + slot, mask=slot >= 0, other=0)
    tl.store(out_ptr + row * num_tokens + t, address, mask=t < num_tokens)


def by_token_triton(slot_T: Tensor, address_VS: Tensor, num_rows: int) -> Tensor:
    num_tokens = len(slot_T)
    assert address_VS.is_contiguous()
    out_VT = torch.empty(num_rows, num_tokens, dtype=torch.int64, device=slot_T.device)
    _by_token_kernel[(num_rows, triton.cdiv(num_tokens, BLOCK_T))](
        slot_T, address_VS, out_VT, num_tokens, num_slots=address_VS.shape[1], block_t=BLOCK_T, num_warps=2
    )
    return out_VT
