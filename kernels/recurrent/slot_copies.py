"""Copies slots of many states, such as those of all recurrent layers, without intermediate memory.

On CUDA it is one launch of kernels/recurrent/slot_copies_triton.py.
"""

# S slots · N numbers of a state

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class SlotCopies:
    """The states between whose slots is copied. They are contiguous, with any shapes and dtypes, and stay where they
    are. Empty ones, such as the memories of layers that have a convolution alone, are left out."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        assert all(state_SN.is_contiguous() for state_SN in states)
        self._states = [state_SN for state_SN in states if state_SN.numel()]
        self._on_device = None
        if self._states and self._states[0].is_cuda:
            from lorafleet.kernels.recurrent.slot_copies_triton import SlotAddresses  # triton is optional on a CPU

            self._on_device = SlotAddresses(self._states)

    def run(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slot `source` of all states to slot `target` for each (source, target).

        A target must be in no other pair.
        """
        if self._on_device is not None:
            self._on_device.copy(pairs)
        else:
            copy_slots_torch(self._states, pairs)


def copy_slots_torch(states: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    for state_SN in states:
        for source, target in pairs:
            state_SN[target].copy_(state_SN[source])
