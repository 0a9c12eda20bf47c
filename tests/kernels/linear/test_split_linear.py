from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm
from lorafleet.kernels.decoder.rope_store import rotate_and_store
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.linear.linear_tuning import LinearShape
from lorafleet.kernels.linear.split_linear import gated_linear, split_linear
from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums
from tests.kernels.harness import poison_free_memory, run_interpreted

ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Tiles that divide the small linears of the interpreter's tests.
SMALL = [
    LinearShape(16, 16, splits, stages=2, early=False, gated=gated)
    for splits, gated in ((1, False), (2, False), (3, False), (6, False), (1, True))
]
SMALL_WIDE = [LinearShape(16, block_d, stages=2, early=False, gated=True, block_t=64) for block_d in (64, 128)]
EIGHT_B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES = [
    LinearShape(),
    LinearShape(splits=3, prefetch=1024),
    LinearShape(128, 64, 2, stages=4, warps=8, prefetch=512),
    LinearShape(64, 128, 4, stages=4, early=False),
]
GATED = [LinearShape(stages=4, gated=True), LinearShape(stages=4, gated=True, prefetch=1024, early=False)]

WIDE = [
    LinearShape(block_o, 64, stages=stages, warps=warps, early=early, gated=True, block_t=block_t)
    for block_o, stages, warps, block_t in ((64, 4, 8, 256), (64, 3, 4, 128), (128, 4, 8, 128), (64, 4, 4, 64))
    for early in (True, False)
]


def make_linear(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, W and a bias."""
    generator = torch.Generator(device).manual_seed(outputs + num_rows)
    x, w, bias = (
        torch.randn(*shape, generator=generator, device=device)
        for shape in ((num_rows, inputs), (outputs, inputs), (outputs,))
    )
    return x.to(dtype), w.mul(inputs**-0.5).to(dtype), bias.to(dtype)


def whole(out: LinearOutput) -> Tensor:
    """The value in float64, whose sums have been rounded to nothing shorter than float32."""
    return out.y_TO.double() if out.sums is None else out.sums.part_KTO.double().sum(0)


def check_linear(x: Tensor, w: Tensor, bias: Tensor | None, out: LinearOutput) -> None:
    want = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert out.y_TO.shape == want.shape and out.y_TO.dtype == x.dtype
    tolerance = 5e-4 if out.sums is not None else ROUNDING[x.dtype]
    torch.testing.assert_close(whole(out), want, atol=tolerance, rtol=tolerance)


def check_gated(x: Tensor, w: Tensor, out: Tensor) -> None:
    gate, up = F.linear(x.double(), w.double()).chunk(2, dim=1)
    assert out.dtype == x.dtype
    tolerance = max(1e-4, ROUNDING[x.dtype])
    torch.testing.assert_close(out.double(), F.silu(gate) * up, atol=tolerance, rtol=tolerance)


def in_sums(y: Tensor, num_sums: int, early: bool = False) -> LinearOutput:
    """Returns y as an output in sums."""
    generator = torch.Generator(y.device).manual_seed(num_sums)
    parts = torch.randn(num_sums, *y.shape, generator=generator, device=y.device)
    parts[-1] = y.float() - parts[:-1].sum(0)
    return LinearOutput(torch.full_like(y, torch.nan), sums=SplitSums(parts, early))


def total(out: LinearOutput) -> Tensor:
    """The sums' total in float32, added in the order of the kernels."""
    assert out.sums is not None
    y, *rest = out.sums.part_KTO
    for part in rest:
        y = y + part
    return y


def assert_equal_once_rounded(out: Tensor, unrounded: Tensor) -> None:
    assert out.dtype == torch.bfloat16 and unrounded.dtype == torch.float32
    torch.testing.assert_close(out.float(), unrounded, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_cpu(dtype: torch.dtype, with_bias: bool) -> None:
    x, w, bias = make_linear(3, 64, 256, dtype)
    check_linear(x, w, bias if with_bias else None, split_linear(x, w, bias if with_bias else None, LinearShape()))
    check_gated(x, w, gated_linear(x, w, LinearShape(gated=True)))
    check_gated(x, w, gated_linear(x, w, LinearShape(gated=True, block_t=64)))


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.linear.split_linear_triton import gated_linear_triton, split_linear_triton
        from tests.kernels.linear.test_split_linear import SMALL, check_gated, check_linear, make_linear

        for dtype in (torch.float32, torch.float16):
            for shape in SMALL:
                for num_rows in (1, 5, 17):
                    x, w, bias = make_linear(num_rows, 32, 256, dtype)
                    for added in (None, bias):
                        out = split_linear_triton(x, w, added, shape)
                        assert out.num_sums == shape.splits
                        check_linear(x, w, added, out)
                    if shape.gated:
                        check_gated(x, w, gated_linear_triton(x, w, shape))
    """)


def test_interpreted_wide_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.linear.wide_gated_triton import wide_gated_triton
        from tests.kernels.linear.test_split_linear import SMALL_WIDE, check_gated, make_linear

        for dtype in (torch.float32, torch.float16):
            for shape in SMALL_WIDE:
                for num_rows in (1, 64, 65, 130):
                    x, w, _ = make_linear(num_rows, 64, 256, dtype)
                    check_gated(x, w, wide_gated_triton(x, w, shape))
    """)


def test_interpreted_readers_add_the_sums() -> None:
    run_interpreted("""
        from lorafleet.kernels.decoder.gated_mul_triton import gated_mul_triton
        from lorafleet.kernels.decoder.rms_norm import NormWeight
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton
        from lorafleet.kernels.decoder.rope_store_triton import rotate_and_store_triton
        from lorafleet.kernels.lora.linear_output import LinearOutput
        from tests.kernels.linear.test_split_linear import in_sums, total

        for num_sums in (1, 2, 5):
            out = in_sums(torch.randn(3, 48), num_sums)
            plain = LinearOutput(total(out))
            assert torch.equal(gated_mul_triton(out), gated_mul_triton(plain))
            residuals = torch.randn(3, 48).expand(2, -1, -1).contiguous()
            weight = NormWeight(torch.randn(48))
            normed = [rms_norm_triton(x, r, weight, 1e-5) for x, r in zip((out, plain), residuals)]
            assert torch.equal(*normed) and torch.equal(*residuals)
            out = in_sums(torch.randn(3, 64), num_sums)  # two heads, one key and one value
            cos, sin = torch.randn(2, 3, 1, 8)
            caches = torch.zeros(2, 2, 2, 4, 1, 16)
            rotated = [
                rotate_and_store_triton(x, cos, sin, None, None, k, v, torch.tensor([5, 0, 7]), 1e-5)
                for x, (k, v) in zip((out, LinearOutput(total(out))), caches)
            ]
            assert torch.equal(*rotated) and torch.equal(*caches)
    """)


def test_readers_without_sums_refuse_them() -> None:
    out = in_sums(torch.randn(2, 16), 2)
    with pytest.raises(AssertionError):
        out.check()
    out.check(reads_sums=True)
    with pytest.raises(AssertionError):
        out._replace(delta_TO=torch.zeros(2, 16)).check(reads_sums=True)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 32, 64])
    @pytest.mark.parametrize("name", EIGHT_B)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_equals_float64(self, dtype: torch.dtype, name: str, num_rows: int) -> None:
        x, w, bias = make_linear(num_rows, *EIGHT_B[name], dtype, "cuda")
        for shape in SHAPES:
            for added in (None, bias):
                poison_free_memory()
                out = split_linear(x, w, added, shape)
                check_linear(x, w, added, out)
                again = split_linear(x, w, added, shape)
                assert torch.equal(whole(out), whole(again))
        if name == "gate_up":
            for shape in GATED:
                poison_free_memory()
                check_gated(x, w, gated_linear(x, w, shape))

    @pytest.mark.parametrize("num_rows", [1, 65, 128, 200, 256, 300])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_wide_kernel_equals_float64(self, dtype: torch.dtype, num_rows: int) -> None:
        x, w, _ = make_linear(num_rows, *EIGHT_B["gate_up"], dtype, "cuda")
        for shape in WIDE:
            poison_free_memory()
            out = gated_linear(x, w, shape)
            check_gated(x, w, out)
            assert torch.equal(out, gated_linear(x, w, shape))

    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("num_rows", [1, 16, 64])
    def test_readers_add_the_sums(self, num_rows: int, early: bool) -> None:
        for num_sums in (1, 2, 6):
            out = in_sums(torch.randn(num_rows, 6144, device="cuda").bfloat16(), num_sums, early)
            plain = LinearOutput(total(out))  # float32, so the results are rounded once, as those of the sums
            assert torch.equal(apply_affine(out), plain.y_TO.bfloat16())
            assert_equal_once_rounded(gated_mul(out), gated_mul(plain))
            residual = torch.randn(num_rows, 6144, device="cuda").bfloat16()
            weight = NormWeight(torch.randn(6144, device="cuda").bfloat16())
            want = (plain.y_TO + residual.float()).bfloat16()
            add_rms_norm(out, residual, weight, 1e-5)
            assert torch.equal(residual, want)
            cos, sin = torch.randn(2, num_rows, 1, 64, device="cuda")
            caches = torch.zeros(2, 2, num_rows, 16, 8, 128, device="cuda")
            slots = torch.arange(num_rows, device="cuda")
            k, v = caches[0].bfloat16()
            q = rotate_and_store(out, cos, sin, None, None, k, v, slots, 1e-5)
            q_plain = rotate_and_store(plain, cos, sin, None, None, *caches[1], slots, 1e-5)
            for found, unrounded in ((q, q_plain), (k, caches[1, 0]), (v, caches[1, 1])):
                assert_equal_once_rounded(found, unrounded)

    @pytest.mark.parametrize("shape", [shape for shape in WIDE if shape.early], ids=str)
    def test_a_graph_of_early_wide_kernels_gives_the_same_bits_as_one_kernel_at_a_time(
        self, shape: LinearShape
    ) -> None:
        """The norm is not early, so it ends before the next wide kernel reads what it has written."""
        size, inner, num_rows = 1024, 4096, 200
        up = make_linear(1, 2 * inner, size, torch.bfloat16, "cuda")[1]
        down = make_linear(1, size, inner, torch.bfloat16, "cuda")[1]
        weight = NormWeight(torch.ones(size, device="cuda", dtype=torch.bfloat16))
        start = torch.randn(num_rows, size, device="cuda").bfloat16()

        def chain(shape: LinearShape) -> Tensor:
            x, residual = start * 1, start * 2
            for _ in range(24):
                out = LinearOutput(F.linear(gated_linear(x, up, shape), down))
                x = add_rms_norm(out, residual, weight, 1e-5)
            return x

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = chain(replace(shape, early=False))
            chain(shape)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain(shape)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, want)

    @pytest.mark.parametrize("prefetch", [0, 1024])
    @pytest.mark.parametrize("num_rows", [1, 16, 64])
    def test_a_graph_of_early_kernels_gives_the_same_bits_as_one_kernel_at_a_time(
        self, num_rows: int, prefetch: int
    ) -> None:
        """Every kernel reads what the one ahead has written, in memory that the graph uses again and again."""
        size, inner, layers = 1024, 4096, 24
        ups = [make_linear(1, 2 * inner, size, torch.bfloat16, "cuda")[1] for _ in range(2)]
        downs = [make_linear(1, size, inner, torch.bfloat16, "cuda")[1] for _ in range(2)]
        weight = NormWeight(torch.ones(size, device="cuda", dtype=torch.bfloat16))
        start = torch.randn(num_rows, size, device="cuda").bfloat16()

        def chain(early: bool) -> Tensor:
            split = LinearShape(splits=4, stages=4, early=early, prefetch=prefetch)
            gated = LinearShape(stages=4, early=early, prefetch=prefetch, gated=True)
            x, residual = start * 1, start * 2
            for layer in range(layers):
                w_up, w_down = ups[layer % 2], downs[layer % 2]
                up = gated_linear(x, w_up, gated) if layer % 3 else gated_mul(split_linear(x, w_up, None, split))
                x = add_rms_norm(split_linear(up, w_down, None, split), residual, weight, 1e-5)
            return x

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = chain(early=False)
            chain(early=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain(early=True)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, want)
