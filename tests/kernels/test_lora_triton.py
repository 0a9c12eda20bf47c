from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import needs_gpu, needs_triton, poison_free_memory, run_interpreted
from tests.kernels.lora_cases import MIXES, build, make_inputs, make_packed, reference, slots_of_tokens

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# qkv, o, gate_up and down of an 8B Llama, and sizes that no block divides.
SHAPES = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)), (77, (130, 1, 15))]


def test_interpreted_kernels_equal_the_loop() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.lora_triton import apply_lora_triton
        from tests.kernels.lora_cases import build, make_inputs, make_packed, reference, slots_of_tokens

        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 6e-3)):
            for in_features, out_features in ((48, (40, 24)), (530, (9,))):
                packed = make_packed(in_features, out_features, ((3, 17), None, (0, 16), (2, 1)), dtype)
                slots = slots_of_tokens("some_base", 19, 4) + [0, 1, 2, 3]
                x, y = make_inputs(packed, len(slots))
                want, before = reference(x, y, packed, slots), y.clone()
                apply_lora_triton(x, y, packed, build(slots))
                torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)
                base = torch.tensor([s == -1 for s in slots])
                assert torch.equal(y[base], before[base])
    """)


@needs_triton
def test_step_whose_adapters_skip_the_linear_launches_nothing() -> None:
    from lorafleet.kernels.lora_triton import apply_lora_triton

    packed = make_packed(32, (16,), (None, (4,)))
    x, y = make_inputs(packed, 3)
    before = y.clone()
    apply_lora_triton(x, y, packed, build([0, 0, 0]))  # would fail here: there is no GPU behind these tensors
    assert torch.equal(y, before)


class TestOnGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize(("in_features", "out_features"), SHAPES, ids=str)
    def test_each_token_gets_its_own_adapter(
        self, in_features: int, out_features: tuple[int, ...], mix: str, dtype: torch.dtype
    ) -> None:
        from lorafleet.kernels.lora_triton import apply_lora_triton

        packed = make_packed(in_features, out_features, dtype=dtype, device="cuda")
        slots = slots_of_tokens(mix, 67, len(packed.slots))
        x, y = make_inputs(packed, len(slots))
        want, before = reference(x, y, packed, slots), y.clone()
        poison_free_memory()
        apply_lora_triton(x, y, packed, build(slots, "cuda"))
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)
        base = torch.tensor([slot == -1 for slot in slots], device="cuda")
        assert torch.equal(y[base], before[base])

    @pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 1000])
    def test_any_number_of_tokens(self, num_tokens: int) -> None:
        from lorafleet.kernels.lora_triton import apply_lora_triton

        packed = make_packed(512, (256, 64, 64), dtype=torch.bfloat16, device="cuda")
        slots = slots_of_tokens("zipf", num_tokens, len(packed.slots))
        x, y = make_inputs(packed, num_tokens)
        want = reference(x, y, packed, slots)
        poison_free_memory()
        apply_lora_triton(x, y, packed, build(slots, "cuda"))
        torch.testing.assert_close(y.double(), want, atol=3e-2, rtol=3e-2)

    @pytest.mark.parametrize("rank", [1, 2, 7, 16, 24, 33, 64, 128, 256])
    def test_any_rank(self, rank: int) -> None:
        from lorafleet.kernels.lora_triton import apply_lora_triton

        packed = make_packed(1024, (512, 128), ((rank, rank), (rank, 0)), torch.bfloat16, "cuda")
        slots = [0, 1, -1, 0, 1]
        x, y = make_inputs(packed, len(slots))
        want, before = reference(x, y, packed, slots), y.clone()
        poison_free_memory()
        apply_lora_triton(x, y, packed, build(slots, "cuda"))
        torch.testing.assert_close(y.double(), want, atol=3e-2, rtol=3e-2)
        assert torch.equal(y[1, 512:], before[1, 512:]), "a slice that the adapter leaves alone was touched"

    def test_same_bits_every_run_and_whoever_shares_the_batch(self) -> None:
        from lorafleet.kernels.lora_triton import apply_lora_triton

        packed = make_packed(4096, (4096, 1024, 1024), dtype=torch.bfloat16, device="cuda")
        slots = slots_of_tokens("zipf", 200, len(packed.slots))
        x, y = make_inputs(packed, len(slots))
        first = y.clone()
        apply_lora_triton(x, first, packed, build(slots, "cuda"))
        for _ in range(10):
            again = y.clone()
            apply_lora_triton(x, again, packed, build(slots, "cuda"))
            assert torch.equal(first, again)
        for t in (0, 3, 57, 199):
            alone = y[t : t + 1].clone()
            apply_lora_triton(x[t : t + 1].contiguous(), alone, packed, build([slots[t]], "cuda"))
            assert torch.equal(first[t : t + 1], alone)
