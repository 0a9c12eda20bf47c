from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import HEADS, PAGE, PagedCase, in_fp8, make_case, naive_attention
from tests.kernels.harness import poison_free_memory, run_interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHORT = [(1, 5), (1, 130), (1, 48), (1, 1)]
LONG = [(1, 1300), (1, 512), (1, 20_000), (1, 3), (1, 16)]
MANY = [(1, 1 + 37 * i % 700) for i in range(200)]
# Sequences with drafts, some of which are all that there is.
DRAFTED = [(5, 5), (1, 130), (3, 102), (4, 53), (2, 129), (1, 1), (5, 300)]
LONG_DRAFTED = [(3, 1300), (1, 512), (5, 20_000), (2, 1025), (4, 16), (5, 6)]


def attend(
    case: PagedCase,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    softcap: float | None = None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
    values_in_keys: bool = False,
    most_rows: int = 1,
    short: list[int] | None = None,
) -> Tensor:
    """Runs the kernels as TritonDecodes does. Partial results that are not written are NaN.

    Args:
        short: Tokens by which each sequence is shorter than the host has planned. The blocks of these hold NaN.
    """
    from lorafleet.kernels.decoder.decode_attention import DecodeBatch, DecodeShape, decode_attention

    q_THD, device = case.q_THD, case.q_THD.device
    (_, _, kv_heads, head_dim), value_dim = case.k_NPGD.shape, case.v_NPGD.shape[3]
    shape = DecodeShape(q_THD.shape[1], kv_heads, head_dim, value_dim, values_in_keys, q_THD.dtype, most_rows)
    rule = shape.rule(window, chunk)
    lens, query_lens = np.array(case.context_lens, dtype=np.int32), np.array(case.query_lens, dtype=np.int32)
    planned = lens if short is None else lens + np.array(short, dtype=np.int32)
    counts = (-(-planned // PAGE)).tolist()
    first_block = np.cumsum([0, *counts], dtype=np.int32)[:-1]
    parts = rule.divide(planned, first_block, query_lens + max(short or [0]))
    spans, merges = (torch.from_numpy(part).to(device) for part in parts)
    unowned = next(i for i in range(len(case.k_NPGD)) if all(i not in table for table in case.block_tables))
    tables = [[*table, unowned][:count] for table, count in zip(case.block_tables, counts, strict=True)]
    blocks = torch.tensor([block for table in tables for block in table], dtype=torch.int32, device=device)
    workspace = torch.full((shape.workspace_numbers(rule),), torch.nan, device=device)
    out_THV = torch.full((*q_THD.shape[:2], value_dim), torch.nan, dtype=q_THD.dtype, device=device)
    rows_B3 = None
    if most_rows > 1:
        rows_B3 = torch.from_numpy(np.stack((np.cumsum(query_lens) - query_lens, query_lens, lens), 1)).int().to(device)
    batch = DecodeBatch(spans, merges, blocks, rows_B3)
    caches, seen = (case.k_NPGD, case.v_NPGD), (window, chunk)
    decode_attention(q_THD, *caches, batch, workspace, shape, out_THV, scale, *kv_scales, softcap, sinks_H, *seen)
    return out_THV


def in_keys(case: PagedCase, value_dim: int) -> PagedCase:
    """The same case with values that are the first numbers of their keys."""
    past = [(k, k[..., :value_dim]) for k, _ in case.past]
    return replace(case, v_NPGD=case.k_NPGD[..., :value_dim], v_TGD=case.k_TGD[..., :value_dim], past=past)


def test_interpreted_kernels_equal_naive_attention() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import head_tiles, key_spans
        from tests.kernels.attention_cases import in_fp8, make_case, naive_attention
        from tests.kernels.decoder.test_decode_attention import SHORT, attend, in_keys

        key_spans.LEAST_KEYS = 32
        sinks = torch.linspace(-2, 3, 6)
        for heads, head_dim, dtype, tolerance in (
            ((6, 2), 32, torch.float32, 1e-5),
            ((6, 1), 24, torch.float16, 3e-3),
        ):
            case = make_case(SHORT, heads, head_dim, dtype)
            case.write_new_tokens()
            for window, softcap, chunk, sinks_H in (
                (None, None, None, None), (7, None, None, sinks), (None, 3.0, 50, None), (100, None, None, sinks)
            ):
                scale = 0.2 if softcap is None else 2.0
                out = attend(case, scale, window, softcap=softcap, chunk=chunk, sinks_H=sinks_H)
                want = naive_attention(case, scale, window, softcap, chunk, sinks_H)
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
        case = in_fp8(case, 0.03, 0.01)
        out, want = attend(case, 0.2, 40, (0.03, 0.01)), naive_attention(case, 0.2, 40)
        torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)
        head_tiles.WIDEST_HEAD = 32  # keys in two parts, as in latent attention
        case = in_keys(make_case(SHORT, (6, 1), 40, torch.float32), 32)
        case.write_new_tokens()
        out, want = attend(case, 0.2, None, values_in_keys=True), naive_attention(case, 0.2, None)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    """)


def test_interpreted_kernels_compute_the_rows_of_drafts_in_one_pass() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import key_spans
        from tests.kernels.attention_cases import in_fp8, make_case, naive_attention
        from tests.kernels.decoder.test_decode_attention import DRAFTED, attend, in_keys

        key_spans.LEAST_KEYS = 32  # the last span of some sequences has no key that their first rows see
        sinks = torch.linspace(-2, 3, 6)
        for heads, head_dim, dtype, tolerance in (
            ((6, 2), 32, torch.float32, 1e-5),
            ((6, 1), 24, torch.float16, 3e-3),
        ):
            case = make_case(DRAFTED, heads, head_dim, dtype)
            case.write_new_tokens()
            for window, softcap, chunk, sinks_H in (
                (None, None, None, None), (7, None, None, sinks), (None, 3.0, 50, None), (100, None, None, sinks)
            ):
                scale = 0.2 if softcap is None else 2.0
                out = attend(case, scale, window, softcap=softcap, chunk=chunk, sinks_H=sinks_H, most_rows=5)
                want = naive_attention(case, scale, window, softcap, chunk, sinks_H)
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
        case = in_fp8(case, 0.03, 0.01)
        out, want = attend(case, 0.2, 40, (0.03, 0.01), most_rows=9), naive_attention(case, 0.2, 40)
        torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)
        case = in_keys(make_case(DRAFTED[:4], (6, 1), 40, torch.float32), 32)
        case.write_new_tokens()
        out, want = attend(case, 0.2, None, values_in_keys=True, most_rows=5), naive_attention(case, 0.2, None)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    """)


def test_interpreted_kernels_read_no_values_behind_a_sequence_that_is_shorter_than_planned() -> None:
    """The memory behind it may hold infinite values that another sequence wrote there."""
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import key_spans
        from tests.kernels.attention_cases import make_case, naive_attention
        from tests.kernels.decoder.test_decode_attention import DRAFTED, attend, in_keys

        key_spans.LEAST_KEYS = 32  # the last spans of some sequences have no keys at all
        short = [4, 0, 3, 4, 4, 2, 4]
        case = make_case(DRAFTED, (6, 2), 32, torch.float32)
        case.write_new_tokens()
        for window, chunk in ((None, None), (7, None), (None, 50)):
            out = attend(case, 0.2, window, chunk=chunk, most_rows=5, short=short)
            want = naive_attention(case, 0.2, window, None, chunk)
            torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        case = in_keys(make_case(DRAFTED[:4], (6, 1), 40, torch.float32), 32)
        case.write_new_tokens()
        out = attend(case, 0.2, None, values_in_keys=True, most_rows=5, short=short[:4])
        torch.testing.assert_close(out.double(), naive_attention(case, 0.2, None), atol=1e-5, rtol=1e-5)
    """)


def test_interpreted_kernels_write_zeros_for_a_sequence_without_tokens() -> None:
    run_interpreted("""
        import torch
        from dataclasses import replace
        from tests.kernels.attention_cases import make_case
        from tests.kernels.decoder.test_decode_attention import attend

        case = make_case([(1, 3), (1, 20)], (4, 2), 32, torch.float32)
        case.write_new_tokens()
        assert attend(case, 0.2, None).abs().min() > 0
        out = attend(replace(case, context_lens=[0, 20], block_tables=[[], case.block_tables[1]]), 0.2, None)
        assert (out[0] == 0).all()
        assert out[1].abs().min() > 0
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("window", [None, 128, 600])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("lens", [SHORT, LONG, MANY], ids=["short", "long", "many"])
    def test_equals_naive_attention(
        self, lens: list[tuple[int, int]], heads: str, window: int | None, dtype: torch.dtype
    ) -> None:
        check(make_case(lens, HEADS[heads], 64, dtype, "cuda"), window)

    @pytest.mark.parametrize("fp8", [False, True])
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256, 512])
    def test_any_head_dim(self, head_dim: int, dtype: torch.dtype, fp8: bool) -> None:
        check(make_case(LONG, (8, 2), head_dim, dtype, "cuda"), None, fp8)

    @pytest.mark.parametrize("fp8", [False, True])
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("heads", [16, 20, 64, 128])
    def test_latent_attention(self, heads: int, dtype: torch.dtype, fp8: bool) -> None:
        check(in_keys(make_case(LONG, (heads, 1), 576, dtype, "cuda"), 512), None, fp8, values_in_keys=True)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("window", [None, 128, 1024])
    def test_caps_chunks_and_sinks(self, window: int | None, dtype: torch.dtype) -> None:
        case = make_case(LONG, (16, 2), 64, dtype, "cuda")
        check(case, window, softcap=3.0)
        check(case, window, chunk=512)
        check(case, window, sinks_H=torch.linspace(-2, 3, 16, device="cuda"))

    def test_large_groups(self) -> None:
        check(make_case(SHORT, (32, 1), 64, torch.bfloat16, "cuda"), None)
        check(make_case(LONG, (71, 1), 64, torch.bfloat16, "cuda"), None)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1), (71, 1)])
    @pytest.mark.parametrize("most_rows", [5, 9])
    def test_drafts(self, most_rows: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
        case = make_case(LONG_DRAFTED, heads, 128, dtype, "cuda")
        check(case, None, most_rows=most_rows)
        check(case, 600, most_rows=most_rows)
        check(case, None, fp8=True, most_rows=most_rows)
        check(case, None, chunk=512, sinks_H=torch.linspace(-2, 3, heads[0], device="cuda"), most_rows=most_rows)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_drafts_with_wide_heads(self, dtype: torch.dtype) -> None:
        check(make_case(LONG_DRAFTED, (8, 2), 512, dtype, "cuda"), None, most_rows=5)
        latent = in_keys(make_case(LONG_DRAFTED, (16, 1), 576, dtype, "cuda"), 512)
        check(latent, None, values_in_keys=True, most_rows=5)

    def test_every_run_gives_the_same_bits(self) -> None:
        case = make_case(LONG, (4, 2), 64, torch.bfloat16, "cuda")
        case.write_new_tokens()
        assert torch.equal(attend(case, 0.1, None), attend(case, 0.1, None))


def check(
    case: PagedCase,
    window: int | None,
    fp8: bool = False,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
    values_in_keys: bool = False,
    most_rows: int = 1,
) -> None:
    """A cap is made to count by larger scores, which float32 holds less exactly."""
    scale = case.q_THD.shape[2] ** -0.5 * (1.0 if softcap is None else min(softcap, 4.0))
    case.write_new_tokens()
    kv_scales = (1.0, 1.0)
    if fp8:
        kv_scales = (0.03, 0.03) if values_in_keys else (0.03, 0.01)
        case = in_fp8(case, *kv_scales)
        if values_in_keys:
            case = in_keys(case, case.v_NPGD.shape[3])
    poison_free_memory()
    out = attend(case, scale, window, kv_scales, softcap, chunk, sinks_H, values_in_keys, most_rows)
    want = naive_attention(case, scale, window, softcap, chunk, sinks_H)
    tolerance = TOLERANCE[case.q_THD.dtype] * (1 if softcap is None else 3)
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
