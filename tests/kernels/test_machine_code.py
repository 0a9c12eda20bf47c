"""The machine code of kernels for an H100 or H200, compiled without one: registers are written before they are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kernels.harness import needs_triton
from tests.kernels.machine_code import nvdisasm, reads_of_compiled, unwritten_reads

# wgmma's descriptors are uniform registers.
WRITTEN = """
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0020*/                   R2UR UR6, R12 ;
        /*0028*/                   IMAD.WIDE R16, R12, 0x4, RZ ;
.L_x_0:
        /*0030*/               @P0 UIADD3 UR14, UP0, UR6, 0x20, URZ ;
        /*0040*/                   UIADD3.X UR15, UR5, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0050*/                   HGMMA.64x16x16.F32 R56, R24, gdesc[UR12].tnspB, R56 ;
        /*0058*/                   IADD3.X R39, R17, R63, RZ, P2, !PT ;
"""


def test_registers_that_are_written_first_are_no_complaint() -> None:
    assert unwritten_reads(WRITTEN) == []


@pytest.mark.parametrize(
    ("line", "address"),
    [
        ("/*0060*/  UIADD3 UR16, UP0, UR16, 0x20, URZ ;", "0060"),
        ("/*0070*/  HGMMA.64x16x16.F32 R56, R24, gdesc[UR20].tnspB, R56 ;", "0070"),
        ("/*0078*/  HGMMA.64x16x16.F32 R56, gdesc[UR12].tnspB, R56 ;", "0078"),
        ("/*0080*/  VIADD R17, R17, UR7 ;", "0080"),
        ("/*0088*/  IADD3.X R40, R64, -0x80000000, RZ, P2, !PT ;", "0088"),
    ],
)
def test_a_register_that_is_read_first_is_found(line: str, address: str) -> None:
    assert [found.split(":")[0] for found in unwritten_reads(f"{WRITTEN}        {line}\n")] == [address]


@needs_triton
def test_no_attention_over_e4m3_reads_a_register_that_nothing_has_written(tmp_path: Path) -> None:
    """Heads of keys and values with other sizes are those that ptxas of CUDA 12.8 got wrong."""
    if nvdisasm() is None:
        pytest.skip("Triton's package has no nvdisasm")
    compiled = reads_of_compiled(
        """
        import torch
        from lorafleet.kernels.decoder.decode_attention import DecodeBatch, DecodeShape, decode_attention
        from lorafleet.kernels.decoder.paged_attention import PagedBatch, paged_attention

        def caches(kv_heads, *sizes):
            return [torch.zeros(3, 16, kv_heads, size, dtype=torch.float8_e4m3fn) for size in sizes]

        for head_dim, value_dim, dtype, has_sinks in (
            (24, 16, torch.bfloat16, False),
            (24, 16, torch.float16, True),
            (64, 32, torch.bfloat16, True),
        ):
            batch = PagedBatch.build([20], [40], [[0, 1, 2]], 16, 2, head_dim, dtype, torch.device("cpu"))
            sinks_H = torch.zeros(4) if has_sinks else None
            q_THD, (k, v) = torch.zeros(20, 4, head_dim, dtype=dtype), caches(2, head_dim, value_dim)
            paged_attention(q_THD, k, v, batch, 1.0, sinks_H=sinks_H)

        q_BHD, (k, v) = torch.zeros(1, 64, 64, dtype=torch.float16), caches(1, 64, 32)
        batch = DecodeBatch(*(torch.zeros(size, dtype=torch.int32) for size in ((1, 5), (1, 3), (3,))))
        shape = DecodeShape(64, 1, 64, 32, False, torch.float16)
        decode_attention(q_BHD, k, v, batch, torch.zeros(0), shape, torch.zeros(1, 64, 32, dtype=torch.float16), 1.0)
        """,
        tmp_path,
    )
    assert compiled == [("attention_kernel", [])] * 3 + [("decode_kernel", [])]


@needs_triton
def test_no_state_space_reads_a_register_that_nothing_has_written(tmp_path: Path) -> None:
    """A float32 one has no products of matrices. ptxas of CUDA 12.8 got those wrong that consist of three in TF32."""
    if nvdisasm() is None:
        pytest.skip("Triton's package has no nvdisasm")
    compiled = reads_of_compiled(
        """
        import torch
        from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
        from lorafleet.kernels.recurrent.state_space import HeadSteps
        from lorafleet.kernels.recurrent.state_space_triton import state_space_triton

        heads, groups, k_dim, v_dim = 4, 2, 8, 12
        batch = RecurrentBatch.build([70], [0], [True], torch.device("cpu"))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            xkq_TC = torch.zeros(70, heads * v_dim + 2 * groups * k_dim, dtype=dtype)
            steps = HeadSteps(torch.zeros(70, heads, dtype=dtype), *torch.zeros(3, heads), (0.0, float("inf")))
            state_space_triton(xkq_TC, steps, torch.zeros(1, heads, k_dim, v_dim), groups, batch)
        """,
        tmp_path,
    )
    assert compiled == [("_step_kernel", []), ("_chunk_kernel", []), ("_chunk_kernel", [])]


@needs_triton
def test_no_kernel_of_codes_or_of_a_delta_step_reads_a_register_that_nothing_has_written(tmp_path: Path) -> None:
    if nvdisasm() is None:
        pytest.skip("Triton's package has no nvdisasm")
    compiled = reads_of_compiled(
        """
        from contextlib import suppress

        import torch
        from lorafleet.kernels.decoder.scratch import Scratch
        from lorafleet.kernels.moe.expert_codes import ExpertCodes
        from lorafleet.kernels.moe.moe_codes_triton import codes_linear
        from lorafleet.kernels.moe.moe_tiles_triton import make_tiles
        from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton
        from lorafleet.kernels.quant.fp8 import FP8
        from lorafleet.kernels.quant.int_triton import dequantize_int_triton, int_linear_triton
        from lorafleet.kernels.quant.int_weight import IntScheme
        from lorafleet.kernels.quant.nf4 import NF4Scheme
        from lorafleet.kernels.quant.nf4_gemv_triton import nf4_gemv_triton
        from lorafleet.kernels.quant.nf4_triton import dequantize_triton, nf4_linear_triton
        from lorafleet.kernels.quant.scaled_linear_triton import scaled_linear_triton
        from lorafleet.kernels.quant.scaled_weight import ScaledScheme
        from lorafleet.kernels.recurrent.delta_step_triton import delta_step_triton
        from tests.kernels.recurrent.test_delta_step import SIZES, check

        bf16, cpu = torch.bfloat16, torch.device("cpu")
        x_TD, out_OD = torch.zeros(20, 256, dtype=bf16), torch.zeros(128, 256, dtype=bf16)
        scratch, int4 = Scratch(bf16, cpu), IntScheme(4, 128, True, 0, torch.float16)
        nf4, ints = (scheme.empty(128, 256, bf16, cpu, scratch) for scheme in (NF4Scheme(), int4))
        nf4.quantized_from = bf16
        nf4_gemv_triton(x_TD[:1], nf4, None)
        nf4_linear_triton(x_TD, nf4, None)
        dequantize_triton(nf4, out_OD)
        int_linear_triton(x_TD, ints, None)
        dequantize_int_triton(ints, out_OD)
        code_OD, scale_OG = out_OD.to(FP8), torch.zeros(128, 2)
        scaled_linear_triton(x_TD, code_OD, scale_OG, None)
        e4m3_linear_triton(x_TD, code_OD, scale_OG, None, scratch.arrived_M)
        expert_TK = torch.zeros(20, 2, dtype=torch.int32)
        tiles = make_tiles(expert_TK, 4, 16)
        torch.cuda.get_device_capability = lambda _: (9, 0)  # as the kernels are compiled
        for scheme in (NF4Scheme(), int4, ScaledScheme(block=128)):
            experts = ExpertCodes(scheme, (4, 128, 256), bf16, cpu)
            if scheme.name == "nf4":
                experts.weight.quantized_from = bf16
            codes_linear(x_TD, experts, tiles, 40)
        with suppress(AssertionError):  # Nothing runs, so values are wrong.
            check(delta_step_triton, "grouped", SIZES["one"], 3, False, bf16)
        """,
        tmp_path,
    )
    assert [(name, reads) for name, reads in compiled if reads] == []
    count = Counter(name for name, _ in compiled)
    assert count["_codes_linear_kernel"] == 3
    of_linears = {f"_{kind}_linear_kernel" for kind in ("codes", "e4m3", "int", "nf4", "scaled")}
    others = {"_nf4_gemv_kernel", "_dequantize_kernel", "_dequantize_int_kernel", "_delta_step_kernel"}
    assert of_linears | others <= count.keys()
