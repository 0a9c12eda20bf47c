"""FP8 adapters against the matrices they were made of, and against PEFT within what e4m3 may round away."""

# R rank · D in features · O out features

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX
from lorafleet.workers.adapters.casting import CHUNK
from lorafleet.workers.slots.quantizing import fp8_scales, to_fp8
from tests.workers.conftest import AdapterDir, MakeAdapter

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Half of what the last of three bits behind the leading one is worth; of numbers too small to have one, in scales.
RELATIVE, OF_SMALL = 2.0**-4, 2.0**-10


def most_rounded_away(matrix: Tensor, scale: Tensor) -> Tensor:
    return (matrix.abs() * RELATIVE).maximum(scale * OF_SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (16, 300), (3, CHUNK + 5), (700, 16), (131, 7)], ids=str)
def test_every_number_is_the_nearest_that_its_scale_allows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix = (torch.randn(shape) * torch.logspace(-3, 3, shape[1])).to(dtype)
    for_rows, for_columns = fp8_scales(matrix, matrix)
    for scale, largest in ((for_rows.unsqueeze(1), matrix.abs().amax(1)), (for_columns, matrix.abs().amax(0))):
        assert torch.equal(scale.flatten(), largest.float() / FP8_MAX)
        quantized = to_fp8(matrix, scale)
        assert quantized.dtype is FP8 and quantized.is_contiguous()
        error = (quantized.double() * scale.double() - matrix.double()).abs()
        assert (error <= 1.0001 * most_rounded_away(matrix.double(), scale.double())).all()


def test_zeros_stay_zeros() -> None:
    """As B is before training."""
    matrix = torch.zeros(4, 6)
    matrix[1] = 1e-44  # less than a scale can be
    scale, _ = fp8_scales(matrix, matrix.T)
    assert not to_fp8(matrix, scale.unsqueeze(1)).float().any() and scale.isfinite().all()


@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 8)])
def test_a_part_is_what_the_whole_has_there(part: slice) -> None:
    a_RD, b_OR = torch.randn(8, 40), torch.randn(24, 8)
    a_scale_R, b_scale_R = fp8_scales(a_RD, b_OR)
    whole, own = to_fp8(a_RD, a_scale_R.unsqueeze(1)), to_fp8(a_RD[part, 10:30], a_scale_R[part].unsqueeze(1))
    assert torch.equal(whole[part, 10:30].double(), own.double())
    assert torch.equal(to_fp8(b_OR, b_scale_R)[5:9].double(), to_fp8(b_OR[5:9], b_scale_R).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_it_adds_is_what_peft_adds_but_for_rounding(make_adapter: MakeAdapter, dtype: torch.dtype) -> None:
    adapter = make_adapter(dtype=dtype, target_modules=ALL, r=16, lora_alpha=24)
    model = adapter.load(dtype=FP8)
    deltas, matrices = adapter.peft_deltas(), adapter.tensors
    assert model.modules.keys() == deltas.keys()
    for name, layer in model.modules.items():
        a_RD, b_OR = (matrices[f"base_model.model.model.{name}.lora_{ab}.weight"].double() for ab in "AB")
        a_error = most_rounded_away(a_RD, a_RD.abs().amax(1, keepdim=True) / FP8_MAX)
        b_error = most_rounded_away(b_OR, b_OR.abs().amax(0) / FP8_MAX)
        bound = b_OR.abs() @ a_error + b_error @ (a_RD.abs() + a_error)
        assert layer.row_scale_R is not None
        found = layer.scaling * (layer.b_OR.double() * layer.row_scale_R) @ layer.a_RD.double()
        error = (found - deltas[name].double()).abs()
        assert (error <= 1.001 * layer.scaling * bound).all()
        assert error.norm() < 0.05 * deltas[name].norm()


def test_num_bytes_counts_the_scales(adapter: AdapterDir) -> None:
    """Rank 4 on q_proj and v_proj of three layers: 32 inputs, 32 and 16 outputs."""
    model = adapter.load(dtype=FP8)
    assert model.num_bytes == 3 * 4 * ((32 + 32) + (32 + 16) + 2 * 4)


def test_numbers_too_large_for_float8_itself_are_served(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(lora_alpha=4000).map(lambda name, x: (name, x * 1e4))
    for name, layer in adapter.load(dtype=FP8).modules.items():
        assert layer.row_scale_R is not None
        found = layer.scaling * (layer.b_OR.float() * layer.row_scale_R) @ layer.a_RD.float()
        assert (found - adapter.peft_deltas()[name]).norm() < 0.05 * found.norm()
