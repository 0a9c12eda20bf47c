from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rope_store import RowHeads, num_stored_heads, rotate_and_store
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import OwnAffine, OwnVectors, own_affine, own_vectors

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS = {"gqa": (4, 2), "mha": (3, 3), "mqa": (5, 1), "llama_8b": (32, 8)}
PAGE = 16
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """A cache of NaN with places for twice the tokens, in any order."""

    qkv: Tensor
    delta: Tensor | None
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | tuple[None, None]
    k: Tensor
    v: Tensor
    slots: Tensor
    scales: tuple[float, float] = (1.0, 1.0)
    affine: OwnAffine | None = None
    own_norms: tuple[OwnVectors, OwnVectors] | None = None
    row_heads: RowHeads = "qkv"
    norms_values: bool = False

    def with_own_vectors(self) -> Case:
        """Tokens have their own scale and bias of qkv, and of the norms' weights where there are norms."""
        num_tokens, width = self.qkv.shape
        head_dim, device = self.k.shape[3], self.qkv.device.type
        norms = [own_vectors(num_tokens, head_dim, 0.0, device, seed) for seed in (5, 6)]
        own_norms = None if self.norms[0] is None else (norms[0], norms[1])
        return replace(self, affine=own_affine(num_tokens, width, device), own_norms=own_norms)

    def norm_of_tokens(self, index: int) -> Tensor | None:
        """[T, 1, D], or [D] where all tokens have the same."""
        weight = self.norms[index]
        if weight is None or self.own_norms is None:
            return weight
        own = self.own_norms[index]
        return torch.where(own.address_T[:, None] == 0, weight.float(), own.value_TO).unsqueeze(1)

    def arguments(self) -> tuple[Any, ...]:
        """Of rotate_and_store, and of the kernel behind it."""
        owns = (None, None) if self.own_norms is None else [own.address_T for own in self.own_norms]
        norms = [None if w is None else NormWeight(w, own_T) for w, own_T in zip(self.norms, owns, strict=True)]
        out = LinearOutput(self.qkv, self.delta, None if self.affine is None else self.affine.affine_2T)
        return (out, self.cos, self.sin, *norms, self.k, self.v, self.slots, EPS, *self.scales)

    def with_rows_of(self, row_heads: RowHeads) -> Case:
        """The same rows without the values, or without keys and values. Stored values are normed."""
        behind = num_stored_heads("qkv", self.k.shape[2]) - num_stored_heads(row_heads, self.k.shape[2])
        width = self.qkv.shape[1] - behind * self.k.shape[3]
        delta = None if self.delta is None else self.delta[:, :width].contiguous()
        norms = (self.norms[0], None) if row_heads == "q" and self.norms[0] is not None else self.norms
        qkv = self.qkv[:, :width].contiguous()
        if row_heads == "qgkv":
            qkv, delta = self._with_gates(qkv), None if delta is None else self._with_gates(delta)
        return replace(self, qkv=qkv, delta=delta, norms=norms, row_heads=row_heads, norms_values=True)

    def _with_gates(self, rows: Tensor) -> Tensor:
        """The same rows with numbers of no effect behind each query."""
        stored = num_stored_heads("qkv", self.k.shape[2])
        q, kv = rows.view(len(rows), -1, self.k.shape[3]).tensor_split((-stored,), dim=1)
        return torch.cat((torch.stack((q, 9 - q), dim=2).flatten(1), kv.flatten(1)), dim=1)

    @property
    def options(self) -> dict[str, Any]:
        return {"row_heads": self.row_heads, "norms_values": self.norms_values}

    def in_fp8(self, k_scale: float, v_scale: float) -> Case:
        return replace(self, k=self.k.to(FP8), v=self.v.to(FP8), scales=(k_scale, v_scale))


def make_case(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    norm: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    delta: bool = False,
    pairs: int | None = None,
) -> Case:
    """pairs: that are rotated; None for all of a head's."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    blocks = -(-2 * num_tokens // PAGE)
    angle = 100 * torch.rand(num_tokens, 1, head_dim // 2 if pairs is None else pairs, generator=generator)
    cache = torch.full((2, blocks, PAGE, heads[1], head_dim), torch.nan, dtype=dtype, device=device)
    return Case(
        qkv=normal(num_tokens, (heads[0] + 2 * heads[1]) * head_dim),
        delta=normal(num_tokens, (heads[0] + 2 * heads[1]) * head_dim) if delta else None,
        cos=angle.cos().to(dtype).to(device),
        sin=angle.sin().to(dtype).to(device),
        norms=(normal(head_dim), normal(head_dim)) if norm else (None, None),
        k=cache[0],
        v=cache[1],
        slots=torch.randperm(blocks * PAGE, generator=generator)[:num_tokens].to(device),
    )


def check(case: Case, q: Tensor) -> None:
    """Against complex numbers in float64; places that no token maps to must still hold NaN."""
    num_kv_heads, head_dim = case.k.shape[2:]
    num_stored = num_stored_heads(case.row_heads, num_kv_heads)
    num_heads = case.qkv.shape[1] // head_dim - num_stored
    qkv = case.qkv.double() if case.delta is None else case.qkv.double() + case.delta.double()
    if case.affine is not None:
        qkv = case.affine.of(case.qkv, case.delta)
    heads = qkv.view(len(case.qkv), -1, head_dim)
    want_q, want_stored = heads.split((num_heads, num_stored), dim=1)
    want_q = want_q[:, ::2] if case.row_heads == "qgkv" else want_q
    assert q.dtype == case.qkv.dtype
    tolerance = TOLERANCE[q.dtype]
    stored = case.slots >= 0
    torch.testing.assert_close(
        q.double(), rotated(case, want_q, case.norm_of_tokens(0)), atol=tolerance, rtol=tolerance
    )
    if not num_stored:
        assert case.k.isnan().all() and case.v.isnan().all()
        return
    want_k, want_v = want_stored[:, :num_kv_heads], want_stored[:, -num_kv_heads:]
    if case.norms_values:
        want_v = want_v / (want_v.square().mean(-1, keepdim=True) + EPS).sqrt()
    places = case.slots[stored]
    # In double, since torch indexes no float8 on a CPU.
    rows = [cache.double().view(-1, num_kv_heads, head_dim) for cache in (case.k, case.v)]
    wants = rotated(case, want_k, case.norm_of_tokens(1))[stored], want_v[stored]
    for row, want, scale in zip(rows, wants, case.scales, strict=True):
        if case.k.dtype == FP8:  # three bits behind the leading one, of normal numbers
            want = want.clamp(-448 * scale, 448 * scale)
            within = {"atol": tolerance + scale / 1024, "rtol": tolerance + 1 / 16}
        else:
            within = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(row[places] * scale, want, **within)
    for row in rows:
        untouched = torch.ones(len(row), dtype=torch.bool, device=row.device).index_fill_(0, places, False)
        assert row[untouched].isnan().all()


def rotated(case: Case, x: Tensor, norm: Tensor | None) -> Tensor:
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    pairs = case.cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = torch.complex(first, second) * torch.complex(case.cos.double(), case.sin.double())
    return torch.cat((turned.real, turned.imag, x[..., 2 * pairs :]), dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_on_a_cpu(heads: str, delta: bool, norm: bool, dtype: torch.dtype) -> None:
    case = make_case(9, HEADS[heads], 24, norm, dtype, delta=delta)
    check(case, rotate_and_store(*case.arguments()))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_end_of_a_head_may_stay_as_it_is(dtype: torch.dtype) -> None:
    case = make_case(9, HEADS["gqa"], 24, True, dtype, pairs=9)
    check(case, rotate_and_store(*case.arguments()))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("row_heads", ["qkv", "qgkv", "qk", "q"])
def test_values_may_be_normed_keys_and_queries_may_stand_alone(row_heads: RowHeads, norm: bool) -> None:
    for dtype in TOLERANCE:
        case = make_case(9, HEADS["gqa"], 24, norm, dtype, delta=True).with_rows_of(row_heads)
        check(case, rotate_and_store(*case.arguments(), **case.options))


def test_a_norms_weight_may_be_float32() -> None:
    case = make_case(9, HEADS["gqa"], 24, True, torch.bfloat16)
    case = replace(case, norms=(1 + torch.randn(24) / 1000, 1 + torch.randn(24) / 1000))
    check(case, rotate_and_store(*case.arguments()))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fp8_cache_on_a_cpu(dtype: torch.dtype) -> None:
    case = make_case(9, HEADS["gqa"], 24, True, dtype).in_fp8(0.03, 0.5)
    check(case, rotate_and_store(*case.arguments()))
    assert_bits(case)


def test_what_fp8_cannot_hold_saturates_on_a_cpu() -> None:
    check_saturation(make_case(9, HEADS["gqa"], 24, False, torch.bfloat16))


def assert_bits(case: Case) -> None:
    """Values are not rotated, so that the stored bytes are known."""
    values = case.qkv.view(len(case.qkv), -1, case.v.shape[3])[:, -case.v.shape[2] :]
    want = (values.float() / case.scales[1]).to(FP8)
    found = case.v.view(torch.uint8).flatten(0, 1)[case.slots]
    assert torch.equal(found, want.view(torch.uint8))


def check_saturation(case: Case) -> None:
    case.qkv.mul_(1000)
    case.qkv[0, -1] = torch.inf
    case.qkv[1] = torch.nan
    case = case.in_fp8(1.0, 2.0)
    rotate_and_store(*case.arguments())
    values = case.qkv.view(len(case.qkv), -1, case.v.shape[3])[:, -case.v.shape[2] :].double() / 2
    found = case.v.double().flatten(0, 1)[case.slots]
    assert found.abs().max() == 448
    too_large = values.abs() > 448
    assert too_large.any()
    assert torch.equal(found[too_large], values[too_large].sign() * 448)
    assert not found[1].any()  # NaN
    assert not case.k.double().flatten(0, 1)[case.slots].isnan().any()


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder.rope_store_triton import rotate_and_store_triton
        from tests.kernels.decoder.test_rope_store import check, make_case

        for heads, head_dim, norm in (((4, 2), 16, False), ((4, 2), 24, True), ((5, 1), 2, True), ((9, 3), 10, False)):
            for delta in (False, True):
                case = make_case(3, heads, head_dim, norm, torch.float32, delta=delta)
                case.slots[1] = -1
                check(case, rotate_and_store_triton(*case.arguments()))
            case = make_case(7, heads, head_dim, norm, torch.float32, delta=True).with_own_vectors()
            check(case, rotate_and_store_triton(*case.arguments()))
        for head_dim, pairs in ((16, 6), (24, 1), (10, 4)):
            case = make_case(3, (4, 2), head_dim, True, torch.float32, delta=True, pairs=pairs)
            check(case, rotate_and_store_triton(*case.arguments()))
        for row_heads in ("qkv", "qgkv", "qk", "q"):
            for norm in (False, True):
                case = make_case(3, (9, 3), 10, norm, torch.float32, delta=True).with_rows_of(row_heads)
                case = case if row_heads == "q" else case.with_own_vectors()
                check(case, rotate_and_store_triton(*case.arguments(), **case.options))
        # The interpreter's rounding to float8 forgets the carry into the exponent: only numbers that need none.
        case = make_case(3, (4, 2), 24, False, torch.float32).in_fp8(0.5, 2.0)
        case.qkv.round_()
        case.cos.fill_(1)
        case.sin.fill_(0)
        check(case, rotate_and_store_triton(*case.arguments()))
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(
        ("heads", "head_dim"), [*((h, 128) for h in HEADS), *(("gqa", d) for d in (2, 64, 80, 96, 256))]
    )
    @pytest.mark.parametrize("num_tokens", [1, 19, 1000])
    def test_equals_the_formula(
        self, num_tokens: int, heads: str, head_dim: int, norm: bool, dtype: torch.dtype
    ) -> None:
        for delta in (False, True):
            case = make_case(num_tokens, HEADS[heads], head_dim, norm, dtype, "cuda", delta)
            poison_free_memory()
            check(case, rotate_and_store(*case.arguments()))

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 128), (19, 80), (1000, 128)])
    def test_tokens_with_vectors_of_their_own(
        self, num_tokens: int, head_dim: int, norm: bool, dtype: torch.dtype
    ) -> None:
        for delta in (False, True):
            case = make_case(num_tokens, HEADS["gqa"], head_dim, norm, dtype, "cuda", delta).with_own_vectors()
            poison_free_memory()
            check(case, rotate_and_store(*case.arguments()))

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("head_dim", "pairs"), [(128, 48), (96, 32), (80, 5)])
    def test_the_end_of_a_head_may_stay_as_it_is(self, head_dim: int, pairs: int, dtype: torch.dtype) -> None:
        for norm in (False, True):
            case = make_case(19, HEADS["gqa"], head_dim, norm, dtype, "cuda", True, pairs)
            poison_free_memory()
            check(case, rotate_and_store(*case.arguments()))

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("row_heads", ["qkv", "qgkv", "qk", "q"])
    @pytest.mark.parametrize("head_dim", [128, 512])
    def test_values_may_be_normed_keys_and_queries_may_stand_alone(
        self, head_dim: int, row_heads: RowHeads, dtype: torch.dtype
    ) -> None:
        for norm in (False, True):
            case = make_case(19, HEADS["gqa"], head_dim, norm, dtype, "cuda", True).with_rows_of(row_heads)
            poison_free_memory()
            check(case, rotate_and_store(*case.arguments(), **case.options))

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(("heads", "head_dim"), [("llama_8b", 128), ("gqa", 80)])
    def test_fp8_cache(self, heads: str, head_dim: int, norm: bool, dtype: torch.dtype) -> None:
        case = make_case(19, HEADS[heads], head_dim, norm, dtype, "cuda").in_fp8(0.03, 0.5)
        poison_free_memory()
        check(case, rotate_and_store(*case.arguments()))
        assert_bits(case)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_what_fp8_cannot_hold_saturates(self, dtype: torch.dtype) -> None:
        check_saturation(make_case(19, HEADS["llama_8b"], 128, False, dtype, "cuda"))

    def test_padding_of_a_graph_is_not_stored(self) -> None:
        case = make_case(16, (32, 8), 128, False, torch.bfloat16, "cuda")
        case.slots[10:] = -1
        check(case, rotate_and_store(*case.arguments()))

    def test_replays_in_a_graph_with_other_slots(self) -> None:
        case, other = (make_case(16, (32, 8), 128, True, torch.bfloat16, "cuda") for _ in range(2))
        other.slots.copy_(other.slots.flip(0))
        rotate_and_store(*case.arguments())  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = rotate_and_store(*case.arguments())
        case.slots.copy_(other.slots)
        case.qkv.copy_(-other.qkv)
        for cache in (case.k, case.v):
            cache.fill_(torch.nan)
        graph.replay()
        check(case, q)

    def test_slots_may_start_anywhere_in_a_buffer(self) -> None:
        case = make_case(5, (32, 8), 128, False, torch.bfloat16, "cuda")
        buffer = torch.zeros(6, dtype=torch.int64, device="cuda")
        buffer[1:] = case.slots
        check(case, rotate_and_store(*case.arguments()[:7], buffer[1:], EPS))
