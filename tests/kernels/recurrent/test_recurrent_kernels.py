"""The kernels of recurrent layers: twins against transformers' own functions, kernels against their twins."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.recurrent.causal_conv import causal_conv, causal_conv_torch
from lorafleet.kernels.recurrent.delta_rule import HeadGates, delta_rule_torch, gated_delta_rule
from lorafleet.kernels.recurrent.gated_norm import gated_norm, gated_norm_torch
from lorafleet.kernels.recurrent.recurrent_batch import FEW_TOKENS as FEW_PER_SEQUENCE
from lorafleet.kernels.recurrent.recurrent_batch import NOT_KEPT, RecurrentBatch
from tests.kernels.harness import run_interpreted

# Steps of three sequences: the tokens of each, with a slot that stays the sequence's own.
STEPS = [{0: 1, 2: 70, 1: 5}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 131, 0: 3}, {2: 2, 0: 1}]
FEW_TOKENS = [{0: 1, 2: 8, 1: 5}, {0: 1, 1: 1, 2: 1}, {2: 2, 1: 1}]  # for the interpreter
SLOT = {0: 3, 1: 0, 2: 2}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """Random inputs of a layer for several sequences, and its weights."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    steps: list[dict[int, int]]
    x: dict[int, Tensor]  # [T, C] of each sequence
    b: dict[int, Tensor]
    a: dict[int, Tensor]
    weight_CK: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor

    @classmethod
    def make(
        cls,
        k_heads: int = 2,
        v_heads: int = 4,
        k_dim: int = 8,
        v_dim: int = 12,
        steps: list[dict[int, int]] = STEPS,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Case:
        random = torch.Generator().manual_seed(0)
        channels = 2 * k_heads * k_dim + v_heads * v_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        lengths = {s: sum(step.get(s, 0) for step in steps) for s in SLOT}
        return cls(
            *(k_heads, v_heads, k_dim, v_dim, steps),
            {s: normal(n, channels) for s, n in lengths.items()},
            *({s: normal(n, v_heads) for s, n in lengths.items()} for _ in range(2)),
            normal(channels, 4),
            torch.rand(v_heads, generator=random).to(device).mul(8).log(),
            normal(v_heads).float(),
        )


def in_steps(case: Case, conv, rule) -> dict[int, Tensor]:
    """Returns each sequence's results [T, H, V], computed in steps from slots that hold garbage before."""
    weight, device = case.weight_CK, case.weight_CK.device
    conv_SCJ = torch.full((4, len(weight), weight.shape[1] - 1), 7.0, dtype=weight.dtype, device=device)
    memory_SHKV = torch.full((4, case.v_heads, case.k_dim, case.v_dim), 7.0, device=device)
    done = dict.fromkeys(SLOT, 0)
    found: dict[int, list[Tensor]] = {s: [] for s in SLOT}
    for step in case.steps:
        spans = {s: slice(done[s], done[s] + n) for s, n in step.items()}
        x_TC, b_TH, a_TH = (
            torch.cat([rows[s][span] for s, span in spans.items()]) for rows in (case.x, case.b, case.a)
        )
        batch = RecurrentBatch.build(
            list(step.values()), [SLOT[s] for s in step], [done[s] == 0 for s in step], device=device
        )
        wide_TC = torch.cat((x_TC, x_TC), dim=1)[:, : x_TC.shape[1]]  # rows that lie apart
        mixed_TC = conv(wide_TC, weight, conv_SCJ, batch)
        gates = HeadGates(b_TH, a_TH, case.a_log_H, case.dt_bias_H)
        out_THV = rule(mixed_TC, gates, memory_SHKV, case.k_heads, batch)
        for s, rows in zip(step, out_THV.split(list(step.values())), strict=True):
            found[s].append(rows)
            done[s] += len(rows)
    assert (conv_SCJ[1] == 7).all(), "a slot that no sequence has"
    assert (memory_SHKV[1] == 7).all()
    return {s: torch.cat(rows) for s, rows in found.items()}


def by_transformers(case: Case, s: int) -> Tensor:
    """Returns a whole sequence's result [T, H, V]."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    x = qwen.causal_conv1d_fn(case.x[s].T[None], case.weight_CK, activation="silu")[0].T
    keys = case.k_heads * case.k_dim
    q, k, v = x.split((keys, keys, case.v_heads * case.v_dim), dim=1)
    decay = -case.a_log_H.exp() * torch.nn.functional.softplus(case.a[s] + case.dt_bias_H)
    out, _ = qwen.torch_chunk_gated_delta_rule(
        *(part.reshape(1, len(x), case.k_heads, case.k_dim) for part in (q, k)),
        v.reshape(1, len(x), case.v_heads, case.v_dim),
        g=decay[None],
        beta=case.b[s].sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def check_triton(dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: Any) -> None:
    from lorafleet.kernels.recurrent.causal_conv_triton import causal_conv_triton
    from lorafleet.kernels.recurrent.delta_rule_triton import delta_rule_triton
    from lorafleet.kernels.recurrent.gated_norm_triton import gated_norm_triton

    case = Case.make(**sizes, dtype=dtype, device=device)
    wanted = in_steps(case, causal_conv_torch, delta_rule_torch)
    for s, out in in_steps(case, causal_conv_triton, delta_rule_triton).items():
        torch.testing.assert_close(out, wanted[s], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    x_THV = wanted[2].contiguous()
    gate_THV = torch.cat((x_THV, x_THV.flip(0)), dim=1)[:, case.v_heads :]
    weight_V = case.dt_bias_H.new_ones(case.v_dim).cumsum(0).to(dtype)
    found = gated_norm_triton(x_THV, gate_THV, weight_V, 1e-6)
    expected = gated_norm_torch(x_THV, gate_THV, weight_V, 1e-6)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_keys_alike(rule, device: str = "cpu", beta_scale: float = 1.0) -> None:
    """Nearly equal keys, full corrections and no decay: inverses by powers of the triangular system would fail here.

    With a beta of 2 the memory does not forget errors.
    """
    tolerance = 1e-4 if beta_scale == 1 else 2e-3
    tokens, dim = 150, 16
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, tokens, dim, generator=random).to(device)
    k = k[:1] + k / 20
    # b and a of 30 and -30: sigmoid and softplus of them are 1 and 0
    b_T1, a_T1 = (torch.full((tokens, 1), value, device=device) for value in (30.0, -30.0))
    gates = HeadGates(b_T1, a_T1, *v.new_zeros(2, 1), beta_scale)
    batch = RecurrentBatch.build([tokens], [0], [True], torch.device(device))
    out = rule(torch.cat((q, k, v), dim=1), gates, torch.zeros(1, 1, dim, dim, device=device), 1, batch)
    q, k, v = (part.double() for part in (q, k, v))
    q, k = (part / (part.square().sum(dim=1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    memory = torch.zeros(dim, dim, dtype=torch.float64, device=device)
    for t in range(tokens):
        memory += beta_scale * torch.outer(k[t], v[t] - k[t] @ memory)
        torch.testing.assert_close(out[t, 0].double(), q[t] @ memory / dim**0.5, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_keys_may_be_alike(beta_scale: float) -> None:
    check_keys_alike(gated_delta_rule, beta_scale=beta_scale)


def test_sequences_in_steps_give_what_transformers_gives_of_each_alone() -> None:
    case = Case.make()
    for s, out in in_steps(case, causal_conv, gated_delta_rule).items():
        torch.testing.assert_close(out, by_transformers(case, s), atol=2e-5, rtol=2e-5)


def test_the_gated_norm_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, gate = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).unbind()
    norm = Qwen3NextRMSNormGated(16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(gated_norm(x, gate, norm.weight.detach(), 1e-5), norm(x, gate).detach())


def test_a_refilled_batch_is_one_that_was_built_with_padding() -> None:
    batch = RecurrentBatch.build([1] * 4, [9] * 4, [True] * 4, torch.device("cpu"))
    batch.refill([1, 1], [2, 0], [False, True], padding_slot=9)
    wanted = RecurrentBatch.build([1] * 4, [2, 0, 9, 9], [False, True, True, True], torch.device("cpu"))
    for name in ("slot_B", "is_new_B", "start_B", "sequence_T"):
        assert getattr(batch, name).tolist() == getattr(wanted, name).tolist()


def test_a_refilled_batch_with_drafts_gives_its_other_rows_to_padding() -> None:
    batch = RecurrentBatch.of_drafts(24, 2, 9, torch.device("cpu"))
    for _ in range(2):
        batch.refill([3, 1], [2, 0], [False, True], 9, [5, NOT_KEPT, NOT_KEPT, NOT_KEPT])
    assert batch.slot_B.tolist() == [2, 0, 9, 9]
    assert batch.is_new_B.tolist() == [0, 1, 1, 1]
    assert batch.start_B.tolist() == [0, 3, 4, 20, 24]
    assert batch.sequence_T.tolist() == [0] * 3 + [1] + [2] * 16 + [3] * 4
    assert batch.kept_T is not None and batch.kept_T.tolist() == [5] + [NOT_KEPT] * 23
    assert max(batch.query_lens) <= FEW_PER_SEQUENCE and batch.long is None


def test_interpreted_kernels_give_what_their_twins_give() -> None:
    run_interpreted("""
        from tests.kernels.recurrent.test_recurrent_kernels import FEW_TOKENS, STEPS, check_keys_alike, check_triton
        from lorafleet.kernels.recurrent.delta_rule_triton import delta_rule_triton

        check_triton(steps=FEW_TOKENS)
        check_triton(steps=FEW_TOKENS[1:], k_heads=1, v_heads=2, k_dim=5, v_dim=40)
        check_triton(steps=STEPS[:3], k_heads=1, v_heads=2, v_dim=40)
        check_keys_alike(delta_rule_triton)
        check_keys_alike(delta_rule_triton, beta_scale=2.0)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("beta_scale", [1.0, 2.0])
    def test_keys_may_be_alike(self, beta_scale: float) -> None:
        check_keys_alike(gated_delta_rule, "cuda", beta_scale)

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize(
        "sizes",
        [{}, {"k_heads": 4, "v_heads": 8, "k_dim": 128, "v_dim": 128}, {"k_heads": 1, "v_heads": 2, "k_dim": 5}],
    )
    def test_kernels_give_what_their_twins_give(self, dtype: torch.dtype, sizes: dict[str, int]) -> None:
        check_triton(dtype, "cuda", **sizes)
