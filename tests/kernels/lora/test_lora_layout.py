"""Both layouts of adapters under tensor parallel: all ranks together give what one rank gives alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lorafleet.kernels.lora.apply_lora import apply_lora
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.lora.lora_torch import _apply_grouped, _apply_stacked
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import run_interpreted
from tests.kernels.lora_cases import MIXES, RANKS_OF_SLOTS, build, make_inputs, make_packed, reference, slots_of_tokens
from tests.kernels.lora_ranks import FakeRank, Kind, joined, on_fake_ranks, own_base, own_input, part_of_packed

FORMS = {"stacked": _apply_stacked, "grouped": _apply_grouped, "entry": apply_lora}
LINEARS: list[tuple[Kind, tuple[int, ...]]] = [("column", (40, 8, 8)), ("row", (34,)), ("row", (5,))]
DIVISIONS = list(product((torch.float32, FP8), LINEARS, (2, 4), (False, True)))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("dtype", "linear", "size", "fully_sharded", "form"),
    # The forms take turns, so that each meets every dtype, linear, size and division.
    [(*division, tuple(FORMS)[index % len(FORMS)]) for index, division in enumerate(DIVISIONS)],
    ids=str,
)
def test_ranks_together_equal_one(
    dtype: torch.dtype, linear: tuple[Kind, tuple[int, ...]], size: int, fully_sharded: bool, form: str, mix: str
) -> None:
    kind, out_features = linear
    whole = make_packed(37, out_features, dtype=dtype)
    slots = slots_of_tokens(mix, 29, len(RANKS_OF_SLOTS))
    x, y = make_inputs(whole, len(slots), dtype=torch.float32)

    def work(rank: FakeRank) -> torch.Tensor:
        own = part_of_packed(whole, rank, kind, fully_sharded)
        own_y = own_base(y, rank, kind, out_features)
        FORMS[form](own_input(x, rank, kind), own_y, own, build(slots, own))
        return own_y

    got = joined(on_fake_ranks(size, work), kind, out_features)
    torch.testing.assert_close(got, reference(x, y, whole, slots), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_lora_dtype_may_be_another_than_the_base_s(kind: Kind) -> None:
    whole = make_packed(32, (16,))
    slots = slots_of_tokens("some_base", 12, len(RANKS_OF_SLOTS))
    x, y = make_inputs(whole, len(slots))

    def work(rank: FakeRank) -> torch.Tensor:
        own = part_of_packed(whole, rank, kind, fully_sharded=True)
        own_y = own_base(y.double(), rank, kind, (16,))
        apply_lora(own_input(x.double(), rank, kind), own_y, own, build(slots, own))
        return own_y

    torch.testing.assert_close(
        joined(on_fake_ranks(2, work), kind, (16,)), reference(x, y, whole, slots), atol=1e-5, rtol=1e-5
    )


def test_step_whose_adapters_skip_the_linear_exchanges_nothing() -> None:
    whole = make_packed(32, (16,), (None, (4,)))
    x, y = make_inputs(whole, 3)
    for form in FORMS.values():
        rank = FakeRank(0, 2)
        own = part_of_packed(whole, rank, "column", fully_sharded=True)
        form(x, y[:, :8].clone(), own, build([0, 0, 0], own))
        assert not rank.sent


@pytest.mark.parametrize(("rank", "want"), [(1, [1, 0, 0, 0]), (5, [2, 2, 1, 0]), (6, [2, 2, 2, 0]), (8, [2, 2, 2, 2])])
def test_ranks_that_do_not_divide_leave_the_last_parts_short(rank: int, want: list[int]) -> None:
    layouts = [LoRALayout("gather", FakeRank(i, 4)) for i in range(4)]
    assert [layout.num_rows(rank) for layout in layouts] == want
    assert [row for layout in layouts for row in range(rank)[layout.rows(rank)]] == list(range(rank))


def test_gathered_columns_of_p_are_the_parts_and_no_padding() -> None:
    pytest.importorskip("triton")
    from lorafleet.kernels.lora.lora_shrink import num_columns

    whole = make_packed(32, (16, 8, 8), ((16, 16, 16), (5, 0, 3)))
    own = part_of_packed(whole, FakeRank(0, 4), "column", fully_sharded=True)
    assert num_columns(own, LoRABatch.static(4, 2, 16, own.tables)) == 3 * 4
    assert num_columns(own, build([0, 1], own)) == 3 * 4 + 2, "room for parts that round up"


def test_interpreted_kernels_of_all_ranks_equal_the_loop() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.quant.fp8 import FP8
        from lorafleet.kernels.lora.lora_triton import lora_delta_triton
        from tests.kernels.lora_cases import build, make_inputs, make_packed, reference, slots_of_tokens
        from tests.kernels.lora_ranks import joined, on_fake_ranks, own_base, own_input, part_of_packed

        torch.use_deterministic_algorithms(True)  # memory that is read but never written is NaN
        mixed = ((3, 17), None, (0, 16), (2, 1), (70, 40))
        for lora_dtype, dtype, tolerance, sizes in (
            (torch.float32, torch.float32, 1e-5, {False: 2, True: 4}),
            (torch.float16, torch.float16, 1e-2, {True: 2}),
            (FP8, torch.float32, 1e-5, {False: 2, True: 2}),
        ):
            for fully_sharded, size in sizes.items():
                for kind, in_features, outs in (("column", 530, (40, 24)), ("row", 1100, (34,)), ("row", 36, (5,))):
                    whole = make_packed(in_features, outs, mixed, lora_dtype)
                    slots = slots_of_tokens("some_base", 13, 5) + [0, 1, 2, 3, 4]
                    x, y = make_inputs(whole, len(slots), dtype=dtype)
                    def work(rank):
                        own = part_of_packed(whole, rank, kind, fully_sharded)
                        own_y = own_base(y.double(), rank, kind, outs)
                        delta = lora_delta_triton(own_input(x, rank, kind), own, build(slots, own))
                        own.part_of(own_y).add_(delta)
                        return own_y
                    got = joined(on_fake_ranks(size, work), kind, outs)
                    torch.testing.assert_close(got, reference(x, y, whole, slots), atol=tolerance, rtol=tolerance)
    """)


def test_interpreted_kernels_of_a_static_batch_equal_the_loop() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.lora.lora_batch import LoRABatch, static_tile_counts
        from lorafleet.kernels.lora.lora_triton import lora_delta_triton
        from tests.kernels.lora_cases import make_inputs, make_packed, reference, slots_of_tokens
        from tests.kernels.lora_ranks import joined, on_fake_ranks, own_input, part_of_packed

        torch.use_deterministic_algorithms(True)
        ranks = ((3, 17), None, (0, 16), (2, 1))
        for kind, outs in (("column", (32, 16)), ("row", (34,))):
            whole = make_packed(64, outs, ranks)
            rank_of_slot = [max(r or (0,)) for r in ranks]
            x, y = make_inputs(whole, 20)
            for mix in ("some_base", "all_different"):
                slots = slots_of_tokens(mix, 17, 4)
                def work(rank):
                    own = part_of_packed(whole, rank, kind, True)
                    batch = LoRABatch.static(20, static_tile_counts(20, 4)[-1], 32, own.tables)
                    batch.fill(slots, rank_of_slot)
                    batch.addresses.look_up()
                    delta = lora_delta_triton(own_input(x, rank, kind), own, batch)
                    assert not delta[17:].any()
                    total = torch.zeros(20, sum(outs) if kind == "row" else delta.shape[1])
                    own.part_of(total).add_(delta)
                    return total
                got = joined(on_fake_ranks(4, work), kind, outs)
                want = reference(x, 0 * y, whole, slots + [-1] * 3)
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    """)
