"""Products of many slots in one batch, by the twin and by the kernel, against the weights they stand for."""

# D in · O out

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lorafleet.kernels.extras.kronecker import RECORD_FIELDS, KroneckerPart, apply_kronecker
from lorafleet.kernels.extras.linear_extras import LinearExtras
from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.kernels.lora.packed_lora import LinearPlace, LoRATables, PackedLoRA
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.lora_cases import slots_of_tokens

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
# Of each slot, (O1, D1) of each slice, None where the slot has none there.
Factors = tuple[tuple[int, int] | None, ...]
SLOTS: tuple[Factors, ...] = (((4, 6), (2, 6)), ((8, 1), None), (None, (16, 2)), (None, None), ((1, 48), (1, 3)))
SIZES = 48, (40, 16)


@dataclass
class Case:
    """A packed linear whose slots have products, and what they are as matrices [out, in]; None: nothing."""

    packed: PackedLoRA
    matrices: list[list[Tensor | None]]
    held: list[Tensor]


def make_case(
    inputs: int,
    outputs: tuple[int, ...],
    slots: tuple[Factors, ...] = SLOTS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    part: tuple[int, int] = (0, 1),
    row_parallel: bool = False,
) -> Case:
    """part: (rank, ranks) that the linear is divided among, by inputs or outputs; the parts need not divide."""
    generator = torch.Generator().manual_seed(0)
    rank, size = part
    own_in, own_out = slice(0, inputs), [slice(0, out) for out in outputs]
    if row_parallel:
        own_in = slice(rank * inputs // size, (rank + 1) * inputs // size)
    else:
        own_out = [slice(rank * out // size, (rank + 1) * out // size) for out in outputs]
    tables = LoRATables(2, len(slots), torch.device(device))
    place = LinearPlace(own_in.start, tuple((own,) for own in own_out))
    sizes = tuple(own.stop - own.start for own in own_out)
    packed = PackedLoRA(1, own_in.stop - own_in.start, sizes, tables, place=place)
    packed.dtype = dtype
    case = Case(packed, [], [])
    for slot, factors in enumerate(slots):
        parts, matrices = [], []
        for out, pair in zip(outputs, factors, strict=True):
            if pair is None:
                parts.append(None)
                matrices.append(None)
                continue
            o1, d1 = pair
            w1 = torch.randn(o1, d1, generator=generator).div(d1**0.5).to(dtype)
            w2 = torch.randn(out // o1, inputs // d1, generator=generator).div((inputs // d1) ** 0.5).to(dtype)
            parts.append(KroneckerPart(w1, w2, 0.5 + slot / 4))
            matrices.append((0.5 + slot / 4) * torch.kron(w1.double(), w2.double()))
        case.matrices.append(matrices)
        if any(parts):
            packed.extras[slot] = LinearExtras(None, None, tuple(parts))
            write_record(case, slot, parts, device)
    return case


def write_record(case: Case, slot: int, parts: list[KroneckerPart | None], device: str) -> None:
    """Where the kernel looks for it; the factors lie anywhere."""
    on_device = [None if p is None else (p.w1.to(device), p.w2.to(device)) for p in parts]
    record = torch.zeros(len(parts), RECORD_FIELDS, dtype=torch.int64, device=device)
    for p, (part, factors) in enumerate(zip(parts, on_device, strict=True)):
        if part is not None and factors is not None:
            offsets = [w.data_ptr() - record.data_ptr() for w in factors]
            (o1, d1), (o2, d2) = part.w1.shape, part.w2.shape
            scale = int(np.float32(part.scale).view(np.int32))
            record[p] = torch.tensor([*offsets, o1, d1, o2, d2, scale, 0])
            case.held += factors
    case.held.append(record)
    extras = case.packed.tables.extras
    addresses = np.zeros(extras.num_rows, np.int64)
    addresses[extras.kronecker_row(1)] = record.data_ptr()
    extras.write_slot(slot, addresses)


def check(case: Case, num_tokens: int, mix: str, dtype: torch.dtype, device: str = "cpu", triton: bool = False) -> None:
    """Against the whole matrices, of which the linear has a part."""
    packed = case.packed
    slots = slots_of_tokens(mix, num_tokens, len(case.matrices))
    batch = LoRABatch.build(slots, packed.tables)
    assert batch is not None
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, packed.in_features, generator=generator).to(dtype)
    before = torch.randn(num_tokens, sum(packed.out_features), generator=generator).to(dtype)
    y, x_there = before.clone().to(device), x.to(device)
    if triton:
        from lorafleet.kernels.extras.kronecker_triton import apply_kronecker_triton

        apply_kronecker_triton(x_there, y, packed, batch)
    else:
        apply_kronecker(x_there, y, packed, batch)
    want = before.to(device).double()
    own_in = slice(packed.place.first_input, packed.place.first_input + packed.in_features)
    for slot in set(slots) - {BASE_SLOT}:
        rows = torch.tensor([t for t, own in enumerate(slots) if own == slot], device=device)
        column = 0
        for matrix, ranges, size in zip(case.matrices[slot], packed.place.outputs, packed.place.sizes, strict=True):
            if matrix is not None:
                own_matrix = torch.cat([matrix[own, own_in] for own in ranges]).to(device)
                want[rows, column : column + size] += x_there[rows].double() @ own_matrix.T
            column += size
    torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    untouched = [t for t, slot in enumerate(slots) if slot == BASE_SLOT or packed.extras[slot] is None]
    assert torch.equal(y.cpu()[untouched], before[untouched])


@pytest.mark.parametrize("mix", ["one", "all_different", "some_base"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_gets_its_own_product(mix: str, dtype: torch.dtype) -> None:
    check(make_case(*SIZES, dtype=dtype), 33, mix, dtype)


PARTS = [((rank, 3), row_parallel) for rank in range(3) for row_parallel in (False, True)]


@pytest.mark.parametrize(("part", "row_parallel"), PARTS)
def test_a_rank_computes_its_own_inputs_and_outputs_of_the_product(part: tuple[int, int], row_parallel: bool) -> None:
    check(make_case(*SIZES, part=part, row_parallel=row_parallel), 9, "all_different", torch.float32)


def test_a_step_without_products_calls_nothing() -> None:
    case = make_case(*SIZES)
    batch = LoRABatch.build([3, BASE_SLOT], case.packed.tables)
    assert batch is not None and not batch.has_kronecker
    with_product = LoRABatch.build([3, 1], case.packed.tables)
    assert with_product is not None and with_product.has_kronecker


def test_a_static_batch_takes_slots_with_products_where_it_launches_them() -> None:
    case = make_case(*SIZES)
    batch = LoRABatch.static(4, 4, 16, case.packed.tables)
    batch.fill([3, BASE_SLOT], [16] * 5)
    assert not batch.has_kronecker
    with pytest.raises(AssertionError, match="does not launch"):
        batch.fill([1], [16] * 5)
    taking = LoRABatch.static(4, 4, 16, case.packed.tables, takes_rare=True)
    for slots in ([1], [3, BASE_SLOT]):
        taking.fill(slots, [16] * 5)
        assert taking.has_kronecker


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.extras import kronecker_triton
        from tests.kernels.extras.test_kronecker import PARTS, SIZES, check, make_case

        kronecker_triton.BLOCK = kronecker_triton.BLOCK_D2 = 16
        for mix in ("some_base", "all_different"):
            check(make_case(*SIZES), 11, mix, torch.float32, triton=True)
        check(make_case(*SIZES, dtype=torch.float16), 5, "all_different", torch.float32, triton=True)
        for part, row_parallel in PARTS:
            case = make_case(*SIZES, part=part, row_parallel=row_parallel)
            check(case, 5, "all_different", torch.float32, triton=True)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 64, 300])
    def test_of_8b_shapes(self, num_tokens: int, dtype: torch.dtype) -> None:
        slots = (((64, 64), (32, 64)), ((8, 8), (8, 8)), (None, (1, 4096)), ((4096, 1), (2, 2)))
        poison_free_memory()
        check(make_case(4096, (4096, 1024), slots, dtype, "cuda"), num_tokens, "zipf", dtype, "cuda")

    @pytest.mark.parametrize(("part", "row_parallel"), PARTS)
    def test_a_ranks_part(self, part: tuple[int, int], row_parallel: bool) -> None:
        case = make_case(*SIZES, device="cuda", part=part, row_parallel=row_parallel)
        check(case, 9, "all_different", torch.float32, "cuda")
        other = make_case(*SIZES, dtype=torch.float16, device="cuda", part=part, row_parallel=row_parallel)
        check(other, 9, "all_different", torch.float32, "cuda")
