"""The log softmax of rows is torch's, and its bits depend on nothing beside the row."""

from __future__ import annotations

import pytest
import torch

from lorafleet.kernels.sampling.row_log_softmax import row_log_softmax
from tests.kernels.harness import run_interpreted


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.sampling import row_log_softmax_triton as module

        module.BLOCK_V = 32
        for columns in (1, 31, 100):
            logits = torch.randn(5, columns) * 5
            logits[2, columns // 2 :] = float("-inf")
            logits[3] = float("nan") if columns > 1 else logits[3]
            wide = torch.full((5, columns + 40), float("-inf"))
            wide[:, :columns] = logits
            found = module.row_log_softmax_triton(wide[:, :columns])
            torch.testing.assert_close(found, logits.log_softmax(-1), equal_nan=True)
            among_more = module.row_log_softmax_triton(wide)[:, :columns]
            assert torch.equal(found.nan_to_num(7), among_more.nan_to_num(7))
            assert torch.equal(module.row_log_softmax_triton(logits[1:2].clone())[0], found[1])
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_compiled_kernel(self, dtype: torch.dtype) -> None:
        logits = (torch.randn(70, 32_003, device="cuda") * 4).to(dtype)
        found = row_log_softmax(logits)
        torch.testing.assert_close(found, logits.double().log_softmax(-1).float(), atol=1e-4, rtol=1e-5)
        for i in (0, 1, 37, 69):
            assert torch.equal(row_log_softmax(logits[i : i + 1].clone())[0], found[i])
