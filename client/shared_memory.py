"""Shares a trainer's tensors with a server on the same node, in memory of its GPU (CUDA IPC) or of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lorafleet.client.tensor_packing import SharedTensors, entries_of, in_file_order
from lorafleet.protocol.cuda_driver import CudaDriver
from lorafleet.protocol.shared_segment import SharedSegment

if TYPE_CHECKING:
    from torch import Tensor


def shared_tensors(tensors: Mapping[str, Any]) -> tuple[str, SharedTensors]:
    """Returns the device that the torch tensors are on, as the server knows it, and their copy there, which exists
    while it is entered.

    Raises ValueError if they are on several devices, and CudaDriverError.
    """
    ordered = in_file_order(tensors)
    devices = {tensor.device for tensor in ordered.values()}
    if len(devices) != 1:
        raise ValueError(f"the tensors are on {len(devices)} devices; move them to one.")
    [device] = devices
    if device.type == "cpu":
        return "cpu", _on_host(ordered)
    import torch  # Only for trainers, which have it.

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # This also makes the GPU current for the driver.
        driver = CudaDriver()
        return driver.current_device(), _on_gpu(ordered, driver, device)


@contextmanager
def _on_gpu(tensors: Mapping[str, Tensor], driver: CudaDriver, device: Any) -> Iterator[dict[str, object]]:
    """Copies the tensors to memory that has nothing else. torch's own may have tensors of others beside them."""
    import torch

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with torch.cuda.device(device):
        address = driver.allocate(max(num_bytes, 1))
        try:
            _fill(torch.as_tensor(_GpuBytes(address, max(num_bytes, 1)), device=device), tensors)
            torch.cuda.synchronize()
            yield {"tensors": entries_of(tensors), "handle": driver.handle_of(address).hex(), "offset": 0}
        finally:
            driver.free(address)


@contextmanager
def _on_host(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, object]]:
    import torch

    segment = SharedSegment(max(sum(tensor.nbytes for tensor in tensors.values()), 1))
    try:
        _fill(torch.frombuffer(segment.content, dtype=torch.uint8), tensors)
        yield {"tensors": entries_of(tensors), "handle": segment.handle.hex(), "offset": 0}
    finally:
        segment.close()


def _fill(target: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors' bytes one after another."""
    import torch

    begin = 0
    for tensor in tensors.values():
        target[begin : begin + tensor.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        begin += tensor.nbytes


class _GpuBytes:
    """Memory of a GPU in the words of __cuda_array_interface__, from which torch makes a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
