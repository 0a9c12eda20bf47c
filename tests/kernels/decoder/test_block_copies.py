"""Copies of KV blocks to rows and back, for caches of several shapes and dtypes: the kernel against its twins."""

from __future__ import annotations

import pytest
import torch

from lorafleet.kernels.decoder.block_copies import BlockCopies, blocks_to_rows_torch, rows_to_blocks_torch
from tests.kernels.harness import run_interpreted

# Keys and values of layers with several heads, of one latent layer, in FP8, and one of more than a program's words.
SHAPES = [
    ((4, 2, 8), torch.float16),
    ((4, 1, 12), torch.float32),
    ((4, 3, 4), torch.uint8),
    ((4, 4, 700), torch.float16),
]
BLOCKS = [5, 0, 3]
ROW_PADDING = 48


def caches(device: str = "cpu", shapes=SHAPES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, *shape).mul(50).to(dtype).to(device) for shape, dtype in shapes]


def rows_for(tensors: list[torch.Tensor]) -> torch.Tensor:
    size = -(-BlockCopies([tensor.cpu() for tensor in tensors]).row_bytes // 16) * 16
    return torch.zeros(len(BLOCKS), size + ROW_PADDING, dtype=torch.uint8, device=tensors[0].device)


def check_kernel(device: str = "cpu", shapes=SHAPES) -> None:
    from lorafleet.kernels.decoder.block_copies_triton import BlockAddresses

    tensors = caches(device, shapes)
    found, wanted = rows_for(tensors), rows_for(tensors)
    BlockAddresses(tensors).copy(BLOCKS, found, to_rows=True)
    blocks_to_rows_torch(tensors, BLOCKS, wanted)
    assert torch.equal(found, wanted) and found.any()
    back, expected = caches(device, shapes), caches(device, shapes)
    BlockAddresses(back).copy(BLOCKS[::-1], found, to_rows=False)
    rows_to_blocks_torch(expected, wanted, BLOCKS[::-1])
    for a, b in zip(back, expected, strict=True):
        assert torch.equal(a, b)


def test_blocks_come_back_as_they_left_and_no_other_changes() -> None:
    tensors, before = caches(), caches()
    copies, rows = BlockCopies(tensors), rows_for(tensors)
    copies.to_rows(BLOCKS, rows)
    for tensor in tensors:
        tensor[BLOCKS] = 0
    copies.from_rows(rows, BLOCKS)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    copies.from_rows(rows, [1, 2, 4])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[1, 2, 4]], old[BLOCKS]) and torch.equal(
            tensor[[0, 3, 5, 6, 7]], old[[0, 3, 5, 6, 7]]
        )


def test_float8_caches_are_copied_as_bytes() -> None:
    cache = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    before, copies = cache.clone(), BlockCopies([cache])
    rows = torch.zeros(1, copies.row_bytes, dtype=torch.uint8)
    copies.to_rows([2], rows)
    copies.from_rows(rows, [0])
    assert torch.equal(cache[0].view(torch.uint8), before[2].view(torch.uint8))


@pytest.mark.parametrize("shapes", ["SHAPES", "SHAPES[:1]"])  # the second are all multiples of 16 bytes
def test_the_kernel_copies_as_its_twins(shapes: str) -> None:
    run_interpreted(f"""
        from tests.kernels.decoder.test_block_copies import SHAPES, check_kernel
        check_kernel(shapes={shapes})
    """)


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("count", [1, 4])
    def test_the_kernel_copies_as_its_twins(self, count: int) -> None:
        check_kernel("cuda", SHAPES[:count])
