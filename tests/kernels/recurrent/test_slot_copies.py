"""Copies of slots between states of several shapes and dtypes: the kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from lorafleet.kernels.recurrent.slot_copies import SlotCopies, copy_slots_torch
from tests.kernels.harness import run_interpreted

SHAPES = [((96, 3), torch.float16), ((4, 8, 16), torch.float32), ((6, 3), torch.float16), ((5000,), torch.float32)]
EMPTY = ((0, 0, 0), torch.float32)  # the memory of a layer that has a convolution alone
PAIRS = [(0, 7), (3, 6), (0, 5)]


def states(device: str = "cpu", shapes=SHAPES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, *shape).to(device, dtype) for shape, dtype in shapes]


def check_kernel(device: str = "cpu", shapes=SHAPES) -> None:
    from lorafleet.kernels.recurrent.slot_copies_triton import SlotAddresses

    found, wanted = states(device, shapes), states(device, shapes)
    SlotAddresses(found).copy(PAIRS)
    copy_slots_torch(wanted, PAIRS)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_slots_are_copied_and_no_other_changes() -> None:
    shapes = [EMPTY, *SHAPES]
    found, before = states(shapes=shapes), states(shapes=shapes)
    SlotCopies(found).run(PAIRS)
    for state, old in zip(found, before, strict=True):
        assert torch.equal(state[[7, 6, 5]], old[[0, 3, 0]])
        assert torch.equal(state[:5], old[:5])


@pytest.mark.parametrize("shapes", ["SHAPES", "SHAPES[:2]"])  # the second are all multiples of 16 bytes
def test_the_kernel_copies_as_its_twin(shapes: str) -> None:
    run_interpreted(f"""
        from tests.kernels.recurrent.test_slot_copies import SHAPES, check_kernel
        check_kernel(shapes={shapes})
    """)


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("count", [2, 4])
    def test_the_kernel_copies_as_its_twin(self, count: int) -> None:
        check_kernel("cuda", SHAPES[:count])

    def test_empty_states_are_left_out(self) -> None:
        shapes = [EMPTY, SHAPES[0], EMPTY]
        found, wanted = states("cuda", shapes), states("cuda", shapes)
        SlotCopies(found).run(PAIRS)
        copy_slots_torch(wanted, PAIRS)
        assert torch.equal(found[1], wanted[1])
