"""The program of a process that is a member of a trainer's torch.distributed group, and receives pushes by broadcasts.

It is a process of its own, because a broadcast that does not come can only be ended with its process.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from lorafleet.client.process_group import (
    WeightsGroupMember,
    join_group,
    open_store,
    say_joined,
)
from lorafleet.cluster.admin.tensor_memory import DTYPE_NAMES
from lorafleet.cluster.receiving.receiver_messages import (
    ReceiveJob,
    ReceiverReport,
    report,
    reported,
    write_at,
)
from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace, complete_until
from lorafleet.protocol.framing import receive
from lorafleet.protocol.weights_group_place import WeightsGroupPlace
from lorafleet.sandbox.program import settings

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_ALIGNMENT = 16  # In bytes, for values of each dtype.
WINDOW_BYTES = 32 << 20  # Tensors of about so many bytes are in flight together.


def main() -> None:
    server, place = socket.socket(fileno=0), WeightsGroupPlace(**settings())
    torch.set_num_threads(1)
    with reported(server):
        store, _ = open_store(place)
        say_joined(store)
        group = join_group(place, store)
    device = torch.device("cuda" if place.backend == "nccl" else "cpu")
    for push in itertools.count():
        message = receive(server)
        if message is None:
            return
        with reported(server):
            group.say_ready(push)
            _receive_push(server, group, msgspec.json.decode(message, type=ReceiveJob), device)


def _receive_push(server: socket.socket, group: WeightsGroupMember, job: ReceiveJob, device: torch.device) -> None:
    memory = os.open(job.memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        complete = iter(complete_until(job.tensors, job.file_bytes))
        for window in _windows(job.tensors):
            num_bytes = max(itertools.islice(complete, len(window)))
            _receive_window(group, window, memory, device)
            report(server, ReceiverReport(num_bytes))
    finally:
        os.close(memory)


def _receive_window(
    group: WeightsGroupMember, window: Sequence[TensorPlace], memory: int, device: torch.device
) -> None:
    """Receives tensors into one buffer, so that one copy brings them to the host."""
    begins = list(accumulate((_aligned(place.num_bytes) for place in window), initial=0))
    buffer = torch.empty(begins[-1], dtype=torch.uint8, device=device)
    places = list(zip(window, begins, strict=False))
    group.broadcast([_view(buffer, place, begin) for place, begin in places])
    host = buffer.cpu().numpy().data
    for place, begin in places:
        write_at(memory, host[begin : begin + place.num_bytes], place.start)


def _view(buffer: Tensor, place: TensorPlace, begin: int) -> Tensor:
    values = buffer[begin : begin + place.num_bytes].view(_DTYPES[place.dtype])
    return values.view(place.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _windows(tensors: Sequence[TensorPlace]) -> Iterator[Sequence[TensorPlace]]:
    """Yields the tensors in order, in groups of about WINDOW_BYTES."""
    begin = num_bytes = 0
    for end, place in enumerate(tensors, 1):
        num_bytes += place.num_bytes
        if num_bytes >= WINDOW_BYTES or end == len(tensors):
            yield tensors[begin:end]
            begin, num_bytes = end, 0


if __name__ == "__main__":
    main()
