from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_cases import BATCHES, HEADS, PAGE, WINDOW, PagedCase, in_fp8, make_case, naive_attention
from tests.kernels.harness import needs_triton, poison_free_memory, run_interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def attend(
    case: PagedCase,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    softcap: float | None = None,
    chunk: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    from lorafleet.kernels.decoder.paged_attention import PagedBatch, paged_attention

    q_THD, lens = case.q_THD, (case.query_lens, case.context_lens)
    group, head_dim = q_THD.shape[1] // case.k_NPGD.shape[2], max(q_THD.shape[2], case.v_NPGD.shape[3])
    batch = PagedBatch.build(*lens, case.block_tables, PAGE, group, head_dim, q_THD.dtype, q_THD.device)
    return paged_attention(q_THD, case.k_NPGD, case.v_NPGD, batch, scale, window, *kv_scales, softcap, chunk, sinks_H)


def test_interpreted_kernel_equals_naive_attention() -> None:
    run_interpreted("""
        import torch
        from tests.kernels.attention_cases import in_fp8, make_case, naive_attention
        from tests.kernels.decoder.test_paged_attention import attend

        decodes, mixed = [(1, 5), (1, 130)], [(1, 9), (17, 17), (3, 70)]
        for lens, heads, head_dim, dtype, tolerance in (
            (decodes, (4, 2), 32, torch.float32, 1e-5),
            (mixed, (4, 2), 32, torch.float32, 1e-5),
            (mixed, (3, 1), 24, torch.float16, 3e-3),
        ):
            case = make_case(lens, heads, head_dim, dtype)
            case.write_new_tokens()
            for window in (None, 7):
                out, want = attend(case, 0.2, window), naive_attention(case, 0.2, window)
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
                out, want = attend(case, 2.0, window, softcap=3.0), naive_attention(case, 2.0, window, 3.0)
                torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
        case = in_fp8(case, 0.03, 0.01)
        out, want = attend(case, 0.2, 7, (0.03, 0.01)), naive_attention(case, 0.2, 7)
        torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("window", [None, WINDOW, 600])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("name", BATCHES)
    def test_equals_naive_attention(self, name: str, heads: str, window: int | None, dtype: torch.dtype) -> None:
        check(make_case(BATCHES[name], HEADS[heads], 64, dtype, "cuda"), window)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
    @pytest.mark.parametrize("name", ["long_decodes", "mixed"])
    def test_any_head_dim(self, name: str, head_dim: int, dtype: torch.dtype) -> None:
        check(make_case(BATCHES[name], (8, 2), head_dim, dtype, "cuda"), None)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("head_dim", "softcap", "fp8"), [(64, 3.0, False), (256, 50.0, False), (256, 3.0, True)])
    @pytest.mark.parametrize("window", [None, WINDOW])
    @pytest.mark.parametrize("name", BATCHES)
    def test_capped_scores(
        self, name: str, window: int | None, head_dim: int, softcap: float, fp8: bool, dtype: torch.dtype
    ) -> None:
        check(make_case(BATCHES[name], (8, 4), head_dim, dtype, "cuda"), window, fp8, softcap)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("window", [None, WINDOW])
    @pytest.mark.parametrize("name", BATCHES)
    def test_fp8_cache_equals_naive_attention_over_what_it_holds(
        self, name: str, window: int | None, dtype: torch.dtype
    ) -> None:
        check(make_case(BATCHES[name], (4, 2), 80, dtype, "cuda"), window, fp8=True)

    def test_large_groups(self) -> None:
        check(make_case(BATCHES["mixed"], (32, 1), 64, torch.bfloat16, "cuda"), None)
        check(make_case(BATCHES["decodes"], (71, 1), 64, torch.bfloat16, "cuda"), None)

    def test_sequence_gets_the_same_bits_alone_and_among_longer_ones(self) -> None:
        case = make_case(BATCHES["long_decodes"], (4, 2), 64, torch.bfloat16, "cuda")
        case.write_new_tokens()
        together = attend(case, 0.1, None)
        assert torch.equal(together, attend(case, 0.1, None))
        for b in range(len(case.query_lens)):
            alone = PagedCase(
                [1], case.context_lens[b : b + 1], case.block_tables[b : b + 1], case.k_NPGD, case.v_NPGD,
                case.q_THD[b : b + 1], case.k_TGD[b : b + 1], case.v_TGD[b : b + 1], case.slot_mapping_T[b : b + 1], [],
            )  # fmt: skip
            assert torch.equal(together[b : b + 1], attend(alone, 0.1, None))

    def test_strided_query(self) -> None:
        case = make_case(BATCHES["mixed"], (4, 2), 64, torch.bfloat16, "cuda")
        wide = torch.empty(case.num_tokens, 8, 64, dtype=torch.bfloat16, device="cuda")
        wide[:, :4] = case.q_THD
        case.write_new_tokens()
        want = attend(case, 0.1, None)
        object.__setattr__(case, "q_THD", wide[:, :4])
        assert torch.equal(attend(case, 0.1, None), want)


def check(case: PagedCase, window: int | None, fp8: bool = False, softcap: float | None = None) -> None:
    """A cap is made to count by larger scores, which float32 holds less exactly."""
    scale = case.q_THD.shape[2] ** -0.5 * (1.0 if softcap is None else min(softcap, 4.0))
    case.write_new_tokens()
    kv_scales = (0.03, 0.01) if fp8 else (1.0, 1.0)
    if fp8:
        case = in_fp8(case, *kv_scales)
    poison_free_memory()
    out, want = attend(case, scale, window, kv_scales, softcap), naive_attention(case, scale, window, softcap)
    tolerance = TOLERANCE[case.q_THD.dtype] * (1 if softcap is None else 3)
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@needs_triton
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 8])
def test_every_table_of_a_batch_is_aligned_since_triton_compiles_for_each_mix_of_alignments(num_seqs: int) -> None:
    from lorafleet.kernels.decoder.paged_attention import PagedBatch

    lens = [1] * num_seqs, [17] * num_seqs
    cpu = torch.device("cpu")
    batch = PagedBatch.build(*lens, [[3, 4, 5]] * num_seqs, 16, 4, 64, torch.float32, cpu)
    for table in (batch.starts_B, batch.context_B, batch.tables_BL):
        assert (table.data_ptr() - batch.tiles_K2.data_ptr()) % 16 == 0
    assert batch.starts_B.tolist() == list(range(num_seqs + 1))
    assert batch.context_B.tolist() == [17] * num_seqs
    assert batch.tables_BL.tolist() == [[3, 4]] * num_seqs
