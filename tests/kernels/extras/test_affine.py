from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.extras.extra_tables import ExtraTables
from lorafleet.kernels.lora.linear_output import LinearOutput
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import own_affine

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_output(num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    y, delta = (torch.randn(num_tokens, size, generator=generator).to(dtype).to(device) for _ in range(2))
    return y, delta


def check_applied(num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """By the kernel."""
    from lorafleet.kernels.extras.affine_triton import apply_affine_triton

    own = own_affine(num_tokens, size, device)
    for has_delta in (False, True):
        y, delta = make_output(num_tokens, size, dtype, device)
        out = LinearOutput(y.clone(), delta if has_delta else None, own.affine_2T)
        found = apply_affine_triton(out)
        assert found is out.y_TO
        want = own.of(y, delta if has_delta else None)
        torch.testing.assert_close(found.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_without_vectors_only_the_adapters_part_is_added() -> None:
    y, delta = make_output(3, 5, torch.float32)
    assert torch.equal(apply_affine(LinearOutput(y.clone(), delta)), y + delta)
    assert apply_affine(LinearOutput(y)) is y


def test_interpreted_kernels_of_vectors_and_of_their_look_up_by_token() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.extras.extra_tables_triton import by_token_triton
        from tests.kernels.extras.test_affine import check_applied, filled_tables

        for num_tokens, size in ((9, 64), (2, 1100), (1, 1)):
            check_applied(num_tokens, size, torch.float32)
        tables = filled_tables()
        for slots in ([2], [0, -1, 2, 1] * 100):
            slot_T = torch.tensor(slots, dtype=torch.int32)
            found = by_token_triton(slot_T, tables.address_VS, tables.num_by_token)
            assert torch.equal(found, tables.by_token(slot_T)) and found.any()
    """)


def filled_tables() -> ExtraTables:
    """Slots 0 and 2 of three."""
    tables = ExtraTables(2, 3, 3, torch.device("cpu"))
    for slot in (0, 2):
        tables.write_slot(slot, torch.arange(tables.num_rows).add(100 * slot + 1).numpy())
    return tables


def test_each_token_finds_its_own_slots_addresses_and_base_tokens_none() -> None:
    tables = filled_tables()
    found = tables.by_token(torch.tensor([2, -1, 0, 1], dtype=torch.int32))
    rows = torch.arange(tables.num_by_token)
    assert torch.equal(found, torch.stack([rows + 201, 0 * rows, rows + 1, 0 * rows], dim=1))
    assert [tables.affine_row(1), tables.norm_row(0), tables.kronecker_row(0)] == [2, 4, tables.num_by_token]


def test_a_slot_without_extras_is_cleared_of_the_ones_before() -> None:
    tables = filled_tables()
    assert tables.kronecker_slots == {0, 2}
    tables.write_slot(2, None)
    assert not tables.address_VS[:, 2].any() and tables.address_VS[:, 0].all()
    assert tables.kronecker_slots == {0}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (7, 4096), (300, 14336), (2049, 77)])
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_equals_the_formula(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        poison_free_memory()
        check_applied(num_tokens, size, dtype, "cuda")
