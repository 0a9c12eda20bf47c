"""Activations as pairs of e4m3 numbers: what is exact, how far off the rest is, and the kernels that multiply them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.decoder.rms_norm import NormWeight, rms_norm
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.quant.e4m3_pairs import joined, pair_block, split_pairs
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from tests.kernels.harness import needs_triton, poison_free_memory, run_interpreted

BLOCK = 32


def every_significand(exponents: list[int]) -> Tensor:
    """Returns all bfloat16 numbers with these exponents, [n, 1] in float32."""
    significands = torch.arange(128, 256) / 128
    numbers = torch.cat([significands * 2.0**exponent for exponent in exponents])
    return torch.cat([numbers, -numbers])[:, None]


def beside(largest: float, number_N1: Tensor) -> Tensor:
    """Returns blocks of one number and `largest`."""
    return torch.cat([number_N1, torch.full((len(number_N1), BLOCK - 1), largest)], dim=1)


@pytest.mark.parametrize("exponent", [-99, -30, 0, 17, 126])
@pytest.mark.parametrize("significand", [1.0, 1.5, 255 / 128])
def test_bfloat16_is_exact_down_to_2_to_the_minus_14_of_the_largest(exponent: int, significand: float) -> None:
    """The smallest number that is promised to be exact has the exponent of largest * 2**-14."""
    exponents = [e for e in range(exponent - 14, exponent) if e >= -126]
    x = beside(significand * 2.0**exponent, every_significand(exponents))
    assert torch.equal(x.bfloat16().float(), x)
    assert torch.equal(joined(split_pairs(x, BLOCK), BLOCK), x)


def test_smaller_numbers_are_off_by_half_a_unit_of_the_scale() -> None:
    x = beside(1.5, every_significand(list(range(-40, -14))))
    pairs = split_pairs(x, BLOCK)
    error = (joined(pairs, BLOCK) - x).abs()
    assert (error <= 2.0**-15 * pairs.scale_TB).all() and error.max() <= 2.0**-22 * 1.5
    assert error.max() > 2.0**-24  # the bound is not loose


def test_tiny_blocks_and_zeros_stay_finite() -> None:
    x = torch.cat([torch.zeros(1, BLOCK), torch.full((1, BLOCK), 2.0**-126), torch.full((1, BLOCK), 1e-39)])
    error = (joined(split_pairs(x, BLOCK), BLOCK) - x).abs()
    assert error.max() <= 2.0**-122 and error[0].max() == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_own_block_nan(bad: float) -> None:
    x = torch.ones(2, 2 * BLOCK)
    x[0, 3] = bad
    back = joined(split_pairs(x, BLOCK), BLOCK)
    assert back[0, 3].isnan() and torch.equal(back[1], x[1]) and torch.equal(back[0, BLOCK:], x[0, BLOCK:])


def test_rounding_keeps_four_bits() -> None:
    x = torch.randn(8, 100)
    back = joined(split_pairs(x, BLOCK, rounds_x=True), BLOCK)
    scale = split_pairs(x, BLOCK).scale_TB.repeat_interleave(BLOCK, dim=1)[:, :100]
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()
    assert not torch.equal(back, x.bfloat16().float())


@pytest.mark.parametrize(
    ("inputs", "group", "block"),
    [(4096, 4096, 128), (36, 36, 128), (4096, 128, 128), (4096, 96, 32), (4096, 32, 32), (4096, 16, None)],
)
def test_a_block_never_holds_two_groups_of_w(inputs: int, group: int, block: int | None) -> None:
    assert pair_block(inputs, group) == block


def test_the_split_in_the_interpreter() -> None:
    run_interpreted(
        """
        from lorafleet.kernels.quant.e4m3_pairs import split_pairs
        from lorafleet.kernels.quant.e4m3_pairs_triton import split_pairs_triton
        x = (torch.randn(6, 300) * torch.logspace(-36, 36, 6)[:, None]).bfloat16().float()
        x[1] = 0
        x[2, :40] /= 2 ** 20
        for rounds_x in (False, True):
            for got, want in zip(split_pairs_triton(x, rounds_x), split_pairs(x, rounds_x=rounds_x)):
                assert torch.equal(got.float(), want.float())
        infinite = torch.ones(3, 40)
        infinite[1, 7] = torch.inf
        assert split_pairs_triton(infinite).scale_TB.isnan().nonzero().tolist() == [[1, 0]]
        """
    )


@pytest.mark.parametrize("splits_inside", [True, False])
def test_the_gemm_in_the_interpreter(splits_inside: bool) -> None:
    """The tokens are ragged, the inputs are divided among 1 to 4 programs, and groups of W have 32 to all columns."""
    run_interpreted(
        f"""
        from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton
        from lorafleet.kernels.quant.e4m3_pairs import joined, split_pairs
        from lorafleet.kernels.quant.e4m3_tuning import E4M3Shape
        from lorafleet.kernels.quant.fp8 import FP8
        arrived = torch.zeros(8, dtype=torch.int32)
        for programs in (1, 64):
            shape = E4M3Shape(32, 16, 2, 4, {splits_inside}, programs)
            cases = ((1, (70, 1024), 1, True), (19, (64, 1088), 1, False), (3, (20, 96), 1, True),
                     (2, (40, 2048), 16, True), (17, (20, 96), 3, False), (2, (300, 512), 4, True))
            for tokens, (outputs, inputs), groups, has_bias in cases:
                for rounds_x in (False,) if {splits_inside} else (False, True):
                    code = (torch.randn(outputs, inputs) * 100).clamp(-448, 448).to(FP8)
                    x, scale = torch.randn(tokens, inputs).bfloat16().float(), torch.rand(outputs, groups) / 100
                    bias = torch.randn(outputs) if has_bias else None
                    got = e4m3_linear_triton(x, code, scale, bias, arrived, rounds_x, shape)
                    multiplied = joined(split_pairs(x, rounds_x=True)) if rounds_x else x
                    values = code.float() * scale.repeat_interleave(inputs // groups, dim=1)
                    torch.testing.assert_close(
                        got, torch.nn.functional.linear(multiplied, values, bias), rtol=1e-4, atol=1e-4)
                    assert not arrived.any()
        """
    )


@needs_triton
@pytest.mark.parametrize(
    ("outputs", "inputs", "programs", "requested"),
    [
        (256, 4096, 4, 512),  # one split of 4096
        (256, 4096, 64, 512),  # splits of 512, all whole
        (256, 4160, 64, 0),  # the last split has 64
        (300, 4096, 4, 0),  # the last tile has rows beyond W
        (256, 4104, 4, 0),  # rows begin between the addresses that a request may have
    ],
)
def test_a_product_begins_early_and_requests_nothing_beyond_w(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, programs: int, requested: int
) -> None:
    from lorafleet.kernels.quant import e4m3_linear_triton as module
    from lorafleet.kernels.quant.e4m3_tuning import E4M3Shape

    launches: list[dict[str, object]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **constants: launches.append(constants | {"grid": grid})

    monkeypatch.setattr(module, "_e4m3_linear_kernel", Recorder())
    x, code = torch.zeros(8, inputs, dtype=torch.bfloat16), torch.zeros(outputs, inputs).to(FP8)
    shape, arrived = (
        E4M3Shape(64, 16, 4, 4, splits_inside=True, programs=programs, prefetch=512),
        torch.zeros(64, dtype=torch.int32),
    )
    for capable in (True, False):
        monkeypatch.setattr(module, "may_start_early", lambda _, capable=capable: capable)
        module.e4m3_linear_triton(x, code, torch.ones(outputs, 1), None, arrived, shape=shape)
    early, late = launches
    assert early["early"] and early["launch_pdl"] and early["prefetch"] == requested
    assert not late["early"] and "launch_pdl" not in late


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("inputs", [600, 4096, 14336])
    def test_the_split_is_that_of_the_twin(self, inputs: int) -> None:
        from lorafleet.kernels.quant.e4m3_pairs_triton import split_pairs_triton

        x = (torch.randn(7, inputs, device="cuda") * torch.logspace(-30, 30, 7, device="cuda")[:, None]).bfloat16()
        x[2] = 0
        poison_free_memory()
        for rounds_x in (False, True):
            got, want = split_pairs_triton(x, rounds_x), split_pairs(x, rounds_x=rounds_x)
            assert torch.equal(got.code_TND.float(), want.code_TND.float())
            assert torch.equal(got.scale_TB, want.scale_TB)
        error = (joined(split_pairs_triton(x)) - x.float()).abs()
        assert (error <= 2.0**-22 * x.float().abs().amax(dim=1, keepdim=True)).all()

    @pytest.mark.parametrize("way", ["split inside", "split before", "rounded"])
    @pytest.mark.parametrize("groups", [1, 32, 128])
    @pytest.mark.parametrize("tokens", [1, 16, 33, 100])
    def test_products_and_equal_bits_of_every_run(self, tokens: int, groups: int, way: str) -> None:
        """Sums of tensor cores have about 14 bits: the error is far below bfloat16's own, 1.7e-3."""
        from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton
        from lorafleet.kernels.quant.e4m3_tuning import E4M3Shape

        outputs, inputs, rounds_x = 1100, 4096, way == "rounded"
        code = (torch.randn(outputs, inputs, device="cuda") * 60).clamp(-448, 448).to(FP8)
        scale = (torch.rand(outputs, groups, device="cuda") + 0.5) / 4096
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        shape = E4M3Shape(64, 16 if tokens <= 16 else 64, 4, 4, way == "split inside")
        arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")
        poison_free_memory()
        got = [e4m3_linear_triton(x, code, scale, None, arrived, rounds_x, shape) for _ in range(20)]
        assert all(torch.equal(one, got[0]) for one in got) and not arrived.any()
        multiplied = joined(split_pairs(x, rounds_x=True)) if rounds_x else x.float()
        exact = multiplied.double() @ (code.double() * scale.double().repeat_interleave(inputs // groups, 1)).T
        assert (got[0].double() - exact).norm() / exact.norm() < 2.5e-3

    @pytest.mark.parametrize("tokens", [1, 8, 64])
    def test_a_product_that_begins_early_reads_what_the_kernels_ahead_write(self, tokens: int) -> None:
        """A norm writes x, one product reads it, and another one reads SiLU(gate) * up of the first one's output."""
        device, weights = torch.device("cuda"), []
        scratch = Scratch(torch.bfloat16, device)
        for outputs, inputs in ((8192, 4096), (4096, 4096)):
            weight = ScaledScheme().empty(outputs, inputs, torch.bfloat16, device, scratch)
            weight.code_OD.copy_((torch.randn(outputs, inputs, device="cuda") * 60).clamp(-448, 448).to(FP8))
            weight.scale_OG.fill_(inputs**-0.5 / 60)
            weights.append(weight)
        norm = NormWeight(torch.rand(4096, device="cuda").bfloat16())
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()

        def work(pause: Callable[[], None]) -> torch.Tensor:
            hidden = x
            for _ in range(8):
                hidden = rms_norm(hidden, norm, 1e-5)
                pause()
                inner = gated_mul(LinearOutput(weights[0].linear(hidden, None)))
                pause()
                hidden = weights[1].linear(inner, None)
                pause()
            return hidden

        want = work(torch.cuda.synchronize)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = work(lambda: None)
        for _ in range(20):
            got.fill_(torch.nan)
            graph.replay()
            assert torch.equal(got, want)

    @pytest.mark.parametrize("tokens", [3, 40])
    def test_one_infinite_number_makes_its_token_nan_and_no_other(self, tokens: int) -> None:
        from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton

        x = torch.ones(tokens, 256, device="cuda", dtype=torch.bfloat16)
        x[1, 7] = torch.inf
        code, scale = torch.ones(64, 256, device="cuda").to(FP8), torch.ones(64, 1, device="cuda")
        arrived = torch.zeros(16, dtype=torch.int32, device="cuda")
        y = e4m3_linear_triton(x, code, scale, None, arrived)
        assert y[1].isnan().all() and (y[0] == 256).all() and (y[2:] == 256).all()
