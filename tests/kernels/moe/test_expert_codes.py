"""Quantized experts: the torch twin and the Triton kernel over codes, against plain experts that have the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.moe import ExpertMatrices, Routing, experts_mlp
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
from lorafleet.kernels.quant.int_weight import IntMatrix, IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.moe.test_moe import TOLERANCE, check, make_adapters, make_case

# For the first linear, 64 inputs are several groups. For the second, 24 are groups too small for tensor cores.
SIZES = {"uneven": (9, 4, 2, 64, 24), "one token": (1, 3, 2, 64, 24), "many a tile": (24, 3, 2, 64, 24)}
LARGE = {"decode": (64, 128, 8, 2048, 768), "uneven": (300, 60, 4, 384, 96), "prefill": (1100, 8, 2, 512, 1792)}
SCHEMES: dict[str, Scheme] = {
    "e4m3 by row": ScaledScheme(),
    "e4m3 by block": ScaledScheme(block=32),
    "int8": ScaledScheme("int8", torch.int8),
    "nf4": NF4Scheme(),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "int4": IntScheme(4, 32),
    "int4 of float16": IntScheme(4, 32, has_zeros=True, dtype=torch.float16),
    "int4 by row": IntScheme(4, None),
    "int8 with zeros": IntScheme(8, 16, has_zeros=True),
    "int4 in any order": IntScheme(4, 8, has_zeros=True, ordered_groups=5),
}


def quantized(values_EOD: Tensor, scheme: Scheme) -> ExpertCodes:
    count, outputs, inputs = values_EOD.shape
    generator = torch.Generator().manual_seed(11)
    experts = ExpertCodes(scheme, (count, outputs, inputs), values_EOD.dtype, values_EOD.device)
    for expert, values_OD in enumerate(values_EOD):
        matrix = scheme.quantize(values_OD)
        if isinstance(scheme, IntScheme) and scheme.has_zeros:
            matrix = with_zeros(matrix, scheme, generator)
        experts.weight.fill(expert * outputs, matrix, (slice(0, outputs), slice(0, inputs)))
    return experts


def with_zeros(matrix: IntMatrix, scheme: IntScheme, generator: torch.Generator) -> IntMatrix:
    """Other zeros and groups of columns, of this expert alone. The values stay small."""
    (outputs, inputs), device = matrix.code_OD.shape, matrix.code_OD.device
    middle, groups = 1 << (scheme.bits - 1), matrix.scale_OG.shape[1]
    group_D = matrix.group_D
    if scheme.ordered_groups:
        groups = scheme.ordered_groups
        group_D = torch.randint(0, groups, (inputs,), generator=generator).to(device)
    zero_OG = torch.randint(middle - 2, middle + 3, (outputs, groups), generator=generator).to(device, torch.uint8)
    scale_OG = matrix.scale_OG[:, torch.arange(groups) % matrix.scale_OG.shape[1]]
    if scheme.dtype is not None:
        scale_OG = scale_OG.to(scheme.dtype)
    return IntMatrix(matrix.code_OD, scale_OG, zero_OG, group_D, scheme.bits)


def make_quantized(
    sizes: tuple[int, ...], dtype: torch.dtype, scheme: Scheme, device: str = "cpu"
) -> tuple[tuple[Tensor, Routing, Tensor, Tensor], ExpertCodes, ExpertCodes]:
    """Returns a case whose plain weights are the quantized ones' values, and the quantized ones."""
    x, routing, *plain = make_case(sizes, dtype, device)
    gate_up, down = (quantized(values_EOD, scheme) for values_EOD in plain)
    values = [torch.stack([codes[e] for e in range(codes.shape[0])]) for codes in (gate_up, down)]
    assert all((v - p).abs().max() > 0 for v, p in zip(values, plain, strict=True))
    return (x, routing, values[0], values[1]), gate_up, down


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_quantized_experts_equal_plain_ones_with_their_values(dtype: torch.dtype, scheme: Scheme) -> None:
    case, gate_up, down = make_quantized(SIZES["uneven"], dtype, scheme)
    adapters, _ = make_adapters(SIZES["uneven"], dtype)
    x, routing, *plain = case
    for own in (None, adapters):
        found = experts_mlp(x, routing, ExpertMatrices(gate_up, down), own)
        assert torch.equal(found, experts_mlp(x, routing, ExpertMatrices(*plain), own))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_interpreted_kernels(scheme: str) -> None:
    run_interpreted(f"""
        import torch
        from lorafleet.kernels.moe import expert_lora_triton, moe, moe_codes_triton, moe_tiles_triton, moe_triton
        from lorafleet.kernels.moe.moe import ExpertMatrices, experts_mlp
        from tests.kernels.moe.test_expert_codes import SCHEMES, SIZES, make_quantized
        from tests.kernels.moe.test_moe import check, make_adapters

        moe._grouped = moe_triton.PairTiles.of
        moe_tiles_triton.FEW = 16, 1  # several turns of each loop
        expert_lora_triton.SPLIT_FEATURES, expert_lora_triton.SHRINK_D, expert_lora_triton.EXPAND_O = 16, 16, 16
        moe_codes_triton.BLOCK_K = 16
        moe_codes_triton.LOOKUP_BLOCK_K = 8
        moe_triton._SHAPES = ((float("inf"), moe_triton._Shape(16, moe_triton._Gemm(16, 8, 1, 1))),)
        scheme = SCHEMES[{scheme!r}]
        all_sizes = {scheme!r} in ("e4m3 by block", "mxfp4")
        for name, sizes in SIZES.items() if all_sizes else [("uneven", SIZES["uneven"])]:
            case, gate_up, down = make_quantized(sizes, torch.float32, scheme)
            x, routing, _, _ = case
            with_adapters = all_sizes and name == "uneven"
            adapters, blocks = make_adapters(sizes, torch.float32) if with_adapters else (None, None)
            check(case, experts_mlp(x, routing, ExpertMatrices(gate_up, down), adapters), adapters)
    """)


def test_interpreted_e4m3_of_gpus_that_do_not_convert_it() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import moe_codes_triton as kernels
        from lorafleet.kernels.moe.expert_codes import ExpertCodes
        from lorafleet.kernels.moe.moe_tiles_triton import make_tiles
        from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix
        from lorafleet.kernels.quant.scaled_weight import ScaledScheme

        code_OD = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
        code_OD = torch.where(code_OD.float().isnan(), 0.0, code_OD.float()).to(torch.float8_e4m3fn)
        experts = ExpertCodes(ScaledScheme(), (1, 4, 64), torch.float32, torch.device("cpu"))
        scale_RC = torch.tensor([[1.0], [2.0], [0.5], [3.0]])
        experts.weight.fill(0, ScaledMatrix(code_OD, scale_RC, (4, 64), (1, 64)), (slice(0, 4), slice(0, 64)))
        kernels._scaled_codes = lambda weight: kernels._Codes(
            kernels.E4M3_BITS.value, weight.code_OD.view(torch.uint8), weight.scale_OG, weight.group
        )
        expert_TK = torch.zeros(64, 1, dtype=torch.int32)
        tiles = make_tiles(expert_TK, 1, 16)
        found_NO = kernels.codes_linear(torch.eye(64), experts, tiles, 64)
        assert torch.equal(found_NO.T, code_OD.float() * scale_RC)
    """)


def test_interpreted_e4m3_codes_are_multiplied_as_they_are() -> None:
    """The test takes the way of GPUs that multiply e4m3. The numbers of x have the bits of bfloat16."""
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import moe_codes_triton as kernels
        from lorafleet.kernels.moe.expert_codes import ExpertCodes
        from lorafleet.kernels.moe.moe_tiles_triton import make_tiles
        from lorafleet.kernels.quant.scaled_weight import ScaledScheme

        kernels._multiplies_e4m3 = lambda codes, x: True
        for block, inputs in ((None, 200), (32, 96), (128, 256)):
            scheme = ScaledScheme(block=block)
            experts = ExpertCodes(scheme, (3, 70, inputs), torch.float32, torch.device("cpu"))
            for expert in range(3):
                matrix = scheme.quantize(torch.randn(70, inputs))
                experts.weight.fill(70 * expert, matrix, (slice(0, 70), slice(0, inputs)))
            x, expert_TK = torch.randn(9, inputs).bfloat16().float(), torch.randint(0, 3, (9, 1), dtype=torch.int32)
            tiles = make_tiles(expert_TK, 3, 16)
            wanted = torch.stack([experts[int(e)] @ row for row, e in zip(x, expert_TK)])
            torch.testing.assert_close(kernels.codes_linear(x, experts, tiles, 9), wanted, rtol=1e-5, atol=1e-4)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
    @pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
    def test_equals_plain_experts_with_the_values(self, sizes: tuple[int, ...], scheme: Scheme) -> None:
        case, gate_up, down = make_quantized(sizes, torch.bfloat16, scheme, "cuda")
        adapters, _blocks = make_adapters(sizes, torch.bfloat16, "cuda")
        poison_free_memory()
        x, routing, *plain = case
        for own in (None, adapters):
            found = experts_mlp(x, routing, ExpertMatrices(gate_up, down), own)
            expected = experts_mlp(x, routing, ExpertMatrices(*plain), own)
            tolerance = 2 * TOLERANCE[torch.bfloat16]
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    def test_float32_equals_a_loop_over_tokens(self) -> None:
        sizes = (9, 5, 3, 64, 32)
        case, gate_up, down = make_quantized(sizes, torch.float32, ScaledScheme(block=32), "cuda")
        check(case, experts_mlp(case[0], case[1], ExpertMatrices(gate_up, down)))
