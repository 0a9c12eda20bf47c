from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.token_mask import mask_tokens
from tests.kernels.harness import run_interpreted

# Rows, vocabulary, words of the mask: exact, ragged, narrower than the vocabulary and wider.
SHAPES = ((1, 64, 2), (5, 77, 3), (3, 200, 4), (4, 50, 9))


def make_case(num_rows: int, num_tokens: int, num_words: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(num_tokens)
    logits = torch.from_numpy(rng.normal(size=(num_rows, num_tokens)).astype(np.float32))
    rows = torch.from_numpy(rng.permutation(num_rows)[: max(1, num_rows // 2)])
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (len(rows), num_words)).astype(np.int32))
    return logits.to(device), rows.to(device), bits.to(device)


def expected(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    out = logits.cpu().clone()
    for row, words in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(logits.shape[1]):
            word, bit = divmod(token, 32)
            if word >= len(words) or not words[word] >> bit & 1:
                out[row, token] = float("-inf")
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_whose_bit_is_missing_get_no_chance_and_other_rows_stay(shape: tuple[int, int, int]) -> None:
    logits, rows, bits = make_case(*shape)
    wanted = expected(logits, rows, bits)
    mask_tokens(logits, rows, bits)
    assert torch.equal(logits, wanted)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import token_mask_triton
        from tests.kernels.decoder.test_token_mask import SHAPES, expected, make_case

        token_mask_triton.BLOCK_V = 32
        for shape in SHAPES:
            logits, rows, bits = make_case(*shape)
            wanted = expected(logits, rows, bits)
            wide = torch.zeros(len(logits), logits.shape[1] + 3)
            view = wide[:, : logits.shape[1]]
            view.copy_(logits)
            token_mask_triton.mask_tokens_triton(view, rows, bits)
            assert torch.equal(view, wanted), shape
            assert not wide[:, logits.shape[1] :].any()
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("shape", [*SHAPES, (64, 128_256, 4008)], ids=str)
    def test_compiled_kernel(self, shape: tuple[int, int, int]) -> None:
        logits, rows, bits = make_case(*shape, device="cuda")
        wanted = logits.cpu().clone()
        mask_tokens(wanted, rows.cpu(), bits.cpu())
        mask_tokens(logits, rows, bits)
        assert torch.equal(logits.cpu(), wanted)
