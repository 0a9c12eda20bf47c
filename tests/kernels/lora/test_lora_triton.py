from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch, static_tile_counts
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import needs_triton, poison_free_memory, run_interpreted
from tests.kernels.lora_cases import (
    MIXES,
    RANKS_OF_SLOTS,
    build,
    make_inputs,
    make_packed,
    reference,
    slots_of_tokens,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# qkv, o, gate_up and down of an 8B Llama, and sizes that no block divides.
SHAPES = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)), (77, (130, 1, 15))]


def test_interpreted_kernels_equal_the_loop() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.quant.fp8 import FP8
        from lorafleet.kernels.lora.lora_triton import lora_delta_triton
        from tests.kernels.lora_cases import build, make_inputs, make_packed, reference, slots_of_tokens

        exact, rounded = (torch.float32, 1e-5), (torch.float16, 6e-3)
        for lora_dtype, (dtype, tolerance) in (
            (torch.float32, exact), (torch.float16, rounded), (FP8, exact), (FP8, rounded)
        ):
            for in_features, out_features in ((48, (40, 24)), (530, (9,))):
                packed = make_packed(in_features, out_features, ((3, 17), None, (0, 16), (2, 1), (70, 0)), lora_dtype)
                slots = slots_of_tokens("some_base", 19, 5) + [0, 1, 2, 3, 4]
                x, y = make_inputs(packed, len(slots), dtype=dtype)
                bias = y[0]
                for shift in (None, bias):
                    want = reference(x, 0 * y if shift is None else shift.expand_as(y), packed, slots)
                    delta = lora_delta_triton(x, packed, build(slots, packed), shift)
                    torch.testing.assert_close(delta.double(), want, atol=tolerance, rtol=tolerance)
                    base = torch.tensor([s == -1 for s in slots])
                    assert torch.equal(delta[base], want[base].to(dtype))
    """)


def test_interpreted_kernels_of_a_static_batch_equal_the_loop() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.quant.fp8 import FP8
        from lorafleet.kernels.lora.lora_batch import LoRABatch, static_tile_counts
        from lorafleet.kernels.lora.lora_triton import lora_delta_triton
        from tests.kernels.lora_cases import make_inputs, make_packed, reference, slots_of_tokens

        dtype = torch.float16
        mixes_of_ranks = ((3, 17), None, (0, 16), (2, 1)), ((8, 16), (16, 24), None, (8, 0))
        for ranks, lora_dtype in zip(mixes_of_ranks * 2, (dtype, dtype, FP8, FP8)):
            packed = make_packed(64, (32, 16), ranks, lora_dtype)
            rank_of_slot = [max(r, default=0) for r in (pair or () for pair in ranks)]
            x, y = make_inputs(packed, 20, dtype=dtype)
            batch = LoRABatch.static(20, static_tile_counts(20, 4)[-1], 32, packed.tables)
            for mix in ("some_base", "all_different", "one"):
                slots = slots_of_tokens(mix, 17, 4)
                batch.fill(slots, rank_of_slot)
                batch.addresses.look_up()
                delta = lora_delta_triton(x, packed, batch)
                want = reference(x, 0 * y, packed, slots + [-1] * 3)
                torch.testing.assert_close(delta.double(), want, atol=6e-3, rtol=6e-3)
                assert not delta[17:].any()
            batch.fill([-1] * 20, rank_of_slot)
            batch.addresses.look_up()
            assert not lora_delta_triton(x, packed, batch).any()
    """)


def test_interpreted_look_up_equals_its_twin() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.lora.tile_tables import TileTables
        from lorafleet.kernels.lora.tile_tables_triton import gather_triton
        from tests.kernels.lora_cases import make_packed

        tables = make_packed(48, (40, 24), ((3, 17), None, (0, 16), (2, 1))).tables
        for slots in ([2], [0, 3, -1, 1, -1] * 20):
            slot_K = torch.tensor(slots, dtype=torch.int32)
            by_tile = TileTables(tables, len(slots))
            by_tile.gather(slot_K)
            want = by_tile.address_LKA, by_tile.rank_LKP, by_tile.scale_LKP
            found = tuple(torch.full_like(t, 7) for t in want)
            gather_triton(slot_K, (tables.address_LSA, tables.rank_LSP, tables.scale_LSP), found)
            assert all(torch.equal(a, b) for a, b in zip(found, want))
            assert by_tile.rank_LKP[1].any() and by_tile.address_LKA[1].any()
    """)


@needs_triton
def test_step_whose_adapters_skip_the_linear_launches_nothing() -> None:
    from lorafleet.kernels.lora.lora_triton import lora_delta_triton

    packed = make_packed(32, (16,), (None, (4,)))
    x, _ = make_inputs(packed, 3)
    # A launch would fail here: there is no GPU behind these tensors.
    assert lora_delta_triton(x, packed, build([0, 0, 0], packed)) is None


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("in_fp8", [False, True])
    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize(("in_features", "out_features"), SHAPES, ids=str)
    def test_each_token_gets_its_own_adapter(
        self, in_features: int, out_features: tuple[int, ...], mix: str, in_fp8: bool, dtype: torch.dtype
    ) -> None:
        packed = make_packed(in_features, out_features, dtype=FP8 if in_fp8 else dtype, device="cuda")
        slots = slots_of_tokens(mix, 67, len(packed.slots))
        x, y = make_inputs(packed, len(slots), dtype=dtype)
        want = reference(x, 0 * y, packed, slots)
        poison_free_memory()
        delta = delta_of(x, packed, slots)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(delta.double(), want, atol=tolerance, rtol=tolerance)
        base = torch.tensor([slot == -1 for slot in slots], device="cuda")
        assert not delta[base].any()

    @pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 1000, 3000])
    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    def test_any_number_of_tokens(self, lora_dtype: torch.dtype, num_tokens: int) -> None:
        packed = make_packed(512, (256, 64, 64), dtype=lora_dtype, device="cuda")
        slots = slots_of_tokens("zipf", num_tokens, len(packed.slots))
        x, y = make_inputs(packed, num_tokens, dtype=torch.bfloat16)
        want = reference(x, 0 * y, packed, slots)
        poison_free_memory()
        torch.testing.assert_close(delta_of(x, packed, slots).double(), want, atol=3e-2, rtol=3e-2)

    @pytest.mark.parametrize("rank", [1, 2, 7, 16, 24, 33, 64, 128, 256])
    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    def test_any_rank(self, lora_dtype: torch.dtype, rank: int) -> None:
        packed = make_packed(1024, (512, 128), ((rank, rank), (rank, 0)), lora_dtype, "cuda")
        slots = [0, 1, -1, 0, 1]
        x, y = make_inputs(packed, len(slots), dtype=torch.bfloat16)
        want = reference(x, 0 * y, packed, slots)
        poison_free_memory()
        delta = delta_of(x, packed, slots)
        torch.testing.assert_close(delta.double(), want, atol=3e-2, rtol=3e-2)
        assert not delta[1, 512:].any(), "the adapter leaves this slice alone"

    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    def test_same_bits_every_run_and_whoever_shares_the_batch(self, lora_dtype: torch.dtype) -> None:
        packed = make_packed(4096, (4096, 1024, 1024), dtype=lora_dtype, device="cuda")
        slots = slots_of_tokens("zipf", 200, len(packed.slots))
        x, _ = make_inputs(packed, len(slots), dtype=torch.bfloat16)
        first = delta_of(x, packed, slots)
        for _ in range(10):
            assert torch.equal(first, delta_of(x, packed, slots))
        for t in (0, 3, 57, 199):
            assert torch.equal(first[t : t + 1], delta_of(x[t : t + 1].contiguous(), packed, [slots[t]]))

    @pytest.mark.parametrize("num_tokens", [1, 8, 64, 256])
    @pytest.mark.parametrize("ranks", [RANKS_OF_SLOTS, ((8, 8, 8), (16, 16, 16), None, (64, 64, 64), (24, 0, 16))])
    @pytest.mark.parametrize(("in_features", "out_features"), SHAPES[:-1], ids=str)
    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    def test_one_graph_serves_any_mix(
        self,
        lora_dtype: torch.dtype,
        in_features: int,
        out_features: tuple[int, ...],
        ranks: Sequence[tuple[int, int, int] | None],
        num_tokens: int,
    ) -> None:
        packed = make_packed(in_features, out_features, ranks, lora_dtype, "cuda")
        rank_of_slot = [max(r or (0,)) for r in ranks]
        x, _ = make_inputs(packed, num_tokens, dtype=torch.bfloat16)
        weight = torch.randn(sum(out_features), in_features, device="cuda").div(in_features**0.5).bfloat16()
        base = x.double() @ weight.double().T
        tiles = static_tile_counts(num_tokens, len(ranks))[-1]
        batch = LoRABatch.static(num_tokens, tiles, max(rank_of_slot), packed.tables)
        poison_free_memory()
        run = captured(lambda: linear(x, weight, None, packed, batch))
        batch.fill([BASE_SLOT] * num_tokens, rank_of_slot)
        base_bits = run()
        torch.testing.assert_close(base_bits.double(), base, atol=3e-2, rtol=3e-2)
        for mix in MIXES:
            slots = slots_of_tokens(mix, num_tokens, len(ranks))
            batch.fill(slots, rank_of_slot)
            poison_free_memory()
            first = run()
            want = reference(x, base, packed, slots)
            torch.testing.assert_close(first.double(), want, atol=3e-2, rtol=3e-2)
            assert torch.equal(first, run())
            is_base = torch.tensor([slot == BASE_SLOT for slot in slots], device="cuda")
            assert torch.equal(first[is_base], base_bits[is_base])
            for t in (0, num_tokens - 1):
                alone = [slot if i == t else BASE_SLOT for i, slot in enumerate(slots)]
                batch.fill(alone, rank_of_slot)
                assert torch.equal(run()[t], first[t]), "the result depends on who shares the batch"

    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("num_tokens", [40, 1500])
    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    def test_bias_and_an_eager_batch(self, lora_dtype: torch.dtype, num_tokens: int, mix: str) -> None:
        packed = make_packed(512, (256, 128, 128), dtype=lora_dtype, device="cuda")
        slots = slots_of_tokens(mix, num_tokens, len(packed.slots))
        x, _ = make_inputs(packed, len(slots), dtype=torch.bfloat16)
        weight = torch.randn(512, 512, device="cuda").div(512**0.5).bfloat16()
        bias = torch.randn(512, device="cuda").bfloat16()
        want = reference(x, x.double() @ weight.double().T + bias.double(), packed, slots)
        got = linear(x, weight, bias, packed, build(slots, packed))
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def delta_of(x: Tensor, packed: PackedLoRA, slots: Sequence[int]) -> Tensor:
    from lorafleet.kernels.lora.lora_triton import lora_delta_triton

    delta = lora_delta_triton(x, packed, build(slots, packed))
    # None: no adapter of the batch has the linear.
    return x.new_zeros(len(slots), sum(packed.out_features)) if delta is None else delta


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedLoRA, batch: LoRABatch) -> Tensor:
    """The sum that the next kernel sees, in a step of this linear alone."""
    batch.begin()
    y, delta, *_ = linear_with_lora(x, PlainWeight(weight), bias, packed, batch)
    return y if delta is None else y.float() + delta.float()


def captured(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        out.fill_(torch.nan)
        graph.replay()
        return out.clone()

    return replay
