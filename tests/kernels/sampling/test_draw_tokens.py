"""Tokens are drawn from the right set with the right chances, by the kernel as by its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lorafleet.kernels.sampling import draw_tokens as drawing
from lorafleet.kernels.sampling.draw_tokens import (
    COUNTS_ROW,
    NO_COUNTS,
    DrawFields,
    Drawn,
    DrawTable,
    draw_tokens,
    warm_up,
)
from lorafleet.kernels.sampling.penalties import IN_PROMPT, penalize
from tests.kernels.harness import run_interpreted

NEVER = float("-inf")


@dataclass(frozen=True)
class Case:
    logits_BV: Tensor
    rows: list[DrawFields]
    counts_SV: Tensor


def make_case(num_rows: int, vocab: int, spread: float, *, coarse: bool = False, counted: int | None = None) -> Case:
    """Rows of every kind: some greedy, some with each filter and with several, some with penalties.

    Args:
        spread: Standard deviation of the logits.
        coarse: Whether many logits are equal.
        counted: Tokens of the counts' vocabulary, as many as the logits' by default.
    """
    generator = torch.Generator().manual_seed(num_rows * 1000 + vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * spread
    logits = (logits * 2).round() / 2 if coarse else logits
    counts = torch.randint(0, 3, (4, counted or vocab), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=generator, dtype=torch.int32)
    rows = []
    for i in range(num_rows):
        penalties = (1.3, 0.4, 0.2) if i % 3 == 1 else (1.0, 0.0, 0.0)
        rows.append(
            DrawFields(
                temperature=(0.0, 0.713, 1.0, 1.931)[i % 4],
                top_k=(vocab, 1, 7, vocab // 2 + 1, vocab)[i % 5],
                top_p=(1.0, 0.917, 0.313, 1.0, 1e-6, 0.9999)[i % 6],
                log_min_p=math.log(0.0173) if i % 7 == 3 else NEVER,
                draw=torch.rand((), generator=generator, dtype=torch.float64).item(),
                last_token=vocab - 1,
                counts_row=i % 4 if i % 3 == 1 else -1,
                repetition=penalties[0],
                presence=penalties[1],
                frequency=penalties[2],
            )
        )
    return Case(logits, rows, counts)


def interval(logits_V: Tensor, row: DrawFields, counts_SV: Tensor, token: int) -> tuple[float, float]:
    """Returns the draws that lead to this token, computed in float64 from the definitions, by sorting."""
    logits_V = logits_V.float().clone()
    if row.counts_row >= 0:
        penalize(logits_V, counts_SV[row.counts_row], row.repetition, row.presence, row.frequency)
    if row.temperature == 0:
        return (0.0, 1.0) if token == int(logits_V.argmax()) else (2.0, 2.0)
    scaled_V = (logits_V - logits_V.max()).double() / row.temperature
    scaled_V[scaled_V < row.log_min_p] = NEVER
    order_V = scaled_V.argsort(descending=True, stable=True)
    scaled_V[order_V[row.top_k :]] = NEVER
    if row.top_p < 1:
        chance_V = scaled_V[order_V].softmax(-1)
        scaled_V[order_V[chance_V.cumsum(-1) - chance_V >= row.top_p]] = NEVER
    chance_V = scaled_V.softmax(-1)
    end = float(chance_V[: token + 1].sum())
    return end - float(chance_V[token]), end


def check(case: Case, tokens: list[int], tolerance: float = 2e-5) -> None:
    for i, (row, token) in enumerate(zip(case.rows, tokens, strict=True)):
        start, end = interval(case.logits_BV[i], row, case.counts_SV, token)
        assert end > start, (i, row, token)
        assert start - tolerance <= row.draw <= end + tolerance, (i, row, token, start, end)


def kept_logprobs(logits_V: Tensor, row: DrawFields, counts_SV: Tensor) -> Tensor:
    """Returns the logprobs of the distribution that is drawn from, by the definitions. Greedy rows have temperature 1
    and no filters."""
    logits_V = logits_V.float().clone()
    if row.counts_row >= 0:
        penalize(logits_V, counts_SV[row.counts_row], row.repetition, row.presence, row.frequency)
    if row.temperature == 0:
        return logits_V.log_softmax(-1)
    scaled_V = (logits_V - logits_V.max()).double() / row.temperature
    scaled_V[scaled_V < row.log_min_p] = NEVER
    order_V = scaled_V.argsort(descending=True, stable=True)
    scaled_V[order_V[row.top_k :]] = NEVER
    if row.top_p < 1:
        chance_V = scaled_V[order_V].softmax(-1)
        scaled_V[order_V[chance_V.cumsum(-1) - chance_V >= row.top_p]] = NEVER
    return scaled_V.log_softmax(-1).float()


def check_logprobs(case: Case, tokens: list[int], wanted, logprobs_PV: Tensor) -> None:
    for i, logprobs_V in zip(wanted, logprobs_PV, strict=True):
        expected_V = kept_logprobs(case.logits_BV[i], case.rows[i], case.counts_SV)
        torch.testing.assert_close(logprobs_V, expected_V, atol=1e-4, rtol=1e-4)
        assert logprobs_V[tokens[i]] > NEVER, "a token that was drawn has a chance"


CASES = (
    {"num_rows": 24, "vocab": 200, "spread": 2.0},
    {"num_rows": 24, "vocab": 200, "spread": 2.0, "coarse": True},
    {"num_rows": 24, "vocab": 130, "spread": 0.01},
    {"num_rows": 24, "vocab": 61, "spread": 20.0, "counted": 40},
    {"num_rows": 12, "vocab": 128, "spread": 3.0, "counted": 150},
    {"num_rows": 7, "vocab": 1, "spread": 1.0},
)


def test_a_start_compiles_the_variants_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases make the logits float32. Others of the same step, or the same request, may have penalties."""
    variants: set[tuple[torch.dtype, bool]] = set()

    def record(logits_BV: Tensor, table_BF: DrawTable, counts_SV: Tensor) -> Drawn:
        variants.add((logits_BV.dtype, bool((table_BF[:, COUNTS_ROW] != NO_COUNTS).any())))
        return draw_tokens(logits_BV, table_BF, counts_SV)

    monkeypatch.setattr(drawing, "draw_tokens", record)
    warm_up(64, torch.bfloat16, torch.device("cpu"))
    assert variants == {(dtype, penalizes) for dtype in (torch.bfloat16, torch.float32) for penalizes in (False, True)}


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_each_draw_leads_to_the_token_whose_interval_holds_it(sizes) -> None:
    case = make_case(**sizes)
    check(case, draw_tokens(case.logits_BV.clone(), np.array(case.rows), case.counts_SV).token_B.tolist())


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_logprobs_are_those_of_the_distribution_that_is_drawn_from(sizes) -> None:
    case = make_case(**sizes)
    wanted = list(range(0, len(case.rows), 2))[::-1]
    drawn = draw_tokens(case.logits_BV.clone(), np.array(case.rows), case.counts_SV, wanted)
    check_logprobs(case, drawn.token_B.tolist(), wanted, drawn.logprobs_PV)


def odd_rows(vocab: int) -> tuple[Tensor, list[DrawFields]]:
    """Returns rows without a distribution, or with hardly one: equal logits, none allowed, NaN, infinities."""
    rows = [
        torch.zeros(vocab),
        torch.full((vocab,), NEVER),
        torch.full((vocab,), math.nan),
        torch.arange(vocab).float().masked_fill(torch.arange(vocab) != 5, NEVER),
        torch.arange(vocab).float() * 1e37,
        torch.zeros(vocab).masked_fill(torch.arange(vocab) == 3, math.inf),
    ]
    logits_BV = torch.stack([row for row in rows for _ in range(3)])
    fields = [DrawFields(0.0, vocab, 1.0, NEVER, 0.0, 19), DrawFields(1e-4, 9, 0.5, -3.0, 0.7, 19)]
    fields.append(DrawFields(1.0, vocab, 1.0, NEVER, 1 - 2**-53, 19))
    return logits_BV, fields * len(rows)


def check_odd(tokens: list[int]) -> None:
    assert all(0 <= token < 20 for token in tokens)
    assert tokens[0] == 0
    assert tokens[1] == 3  # 5 of the first 9 of equal logits reach one half, and .7 falls on the fourth
    assert tokens[2] == 19
    assert tokens[9:12] == [5, 5, 5]


def test_rows_without_a_distribution_give_a_token_of_their_vocabulary() -> None:
    logits_BV, rows = odd_rows(50)
    check_odd(draw_tokens(logits_BV, np.array(rows), torch.zeros((0, 50), dtype=torch.int32)).token_B.tolist())


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.sampling import draw_tokens_triton, kept_bounds
        from lorafleet.kernels.sampling.draw_tokens import draw_tokens
        from tests.kernels.sampling.test_draw_tokens import (
            CASES, check, check_logprobs, check_odd, make_case, odd_rows,
        )

        import numpy as np
        import triton.language as tl

        draw_tokens_triton.BLOCK_V, draw_tokens_triton.NUM_WARPS = 64, 2
        draw_tokens_triton.MAX_NEAR = tl.constexpr(16)
        for sizes in CASES:
            case = make_case(**sizes)
            table = torch.tensor(case.rows, dtype=torch.float64)
            wide = torch.full((len(table), case.logits_BV.shape[1] + 3), 99.0)
            view = wide[:, :-3]
            view.copy_(case.logits_BV)
            drawn_B, bounds = draw_tokens_triton.draw_tokens_triton(view, table, case.counts_SV, penalizes=True)
            tokens = drawn_B.tolist()
            check(case, tokens)
            assert (wide[:, -3:] == 99).all()
            every = range(len(tokens))
            kept_bounds.SPAN_ROWS = 5
            logprobs_PV = bounds.logprobs(every)
            check_logprobs(case, tokens, every, logprobs_PV)
            twin = draw_tokens(case.logits_BV.clone(), np.array(case.rows), case.counts_SV, every)
            assert tokens == twin.token_B.tolist()
            torch.testing.assert_close(logprobs_PV, twin.logprobs_PV, atol=1e-5, rtol=1e-5)
        logits, rows = odd_rows(50)
        table, counts = torch.tensor(rows, dtype=torch.float64), torch.zeros((0, 50), dtype=torch.int32)
        check_odd(draw_tokens_triton.draw_tokens_triton(logits, table, counts, penalizes=False)[0].tolist())
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("spread", [0.05, 1.3, 6.0])
    @pytest.mark.parametrize("num_rows", [1, 30, 140])
    def test_compiled_kernel(self, num_rows: int, spread: float, dtype: torch.dtype) -> None:
        case = make_case(num_rows, 32_003, spread)
        logits_BV = case.logits_BV.to(dtype)
        case = Case(logits_BV.float(), case.rows, case.counts_SV)
        drawn = draw_tokens(logits_BV.cuda(), np.array(case.rows), case.counts_SV.cuda(), range(num_rows))
        tokens = drawn.token_B.tolist()
        # bf16 logits have many ties, which one weight at the border of top_p decides.
        check(case, tokens, tolerance=1e-3 if spread > 1 else 1e-4)
        twin = draw_tokens(logits_BV.clone(), np.array(case.rows), case.counts_SV).token_B.tolist()
        assert sum(a == b for a, b in zip(tokens, twin, strict=True)) >= 0.98 * num_rows
        own_B = drawn.logprobs_PV.cpu().gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (own_B > NEVER).all()
        wanted_BV = draw_tokens(logits_BV.clone(), np.array(case.rows), case.counts_SV, range(num_rows)).logprobs_PV
        # A token at the border of top_p may be kept by one alone.
        torch.testing.assert_close(
            own_B.exp(), wanted_BV.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).exp(), atol=2e-3, rtol=2e-3
        )

    def test_rows_without_a_distribution(self) -> None:
        logits_BV, rows = odd_rows(50)
        check_odd(
            draw_tokens(
                logits_BV.cuda(), np.array(rows), torch.zeros((0, 50), dtype=torch.int32).cuda()
            ).token_B.tolist()
        )

    def test_draws_follow_the_distribution(self) -> None:
        logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 2
        draws = torch.rand(200_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
        rows = [DrawFields(0.9, 4000, 0.95, NEVER, draw, 4999) for draw in draws]
        counts = torch.zeros((0, 5000), dtype=torch.int32, device="cuda")
        found = torch.zeros(5000)
        for start in range(0, len(rows), 10_000):
            part = rows[start : start + 10_000]
            tokens = draw_tokens(logits_V.cuda().expand(len(part), -1).contiguous(), np.array(part), counts).token_B
            found += torch.bincount(tokens.cpu(), minlength=5000)
        order_V = (logits_V / 0.9).argsort(descending=True)
        scaled_V = logits_V.double() / 0.9
        scaled_V[order_V[4000:]] = NEVER
        chance_V = scaled_V[order_V].softmax(-1)
        scaled_V[order_V[chance_V.cumsum(-1) - chance_V >= 0.95]] = NEVER
        wanted_V = scaled_V.softmax(-1)
        assert ((found / len(rows) - wanted_V).abs() < 5 * (wanted_V / len(rows)).sqrt() + 1e-6).all()
