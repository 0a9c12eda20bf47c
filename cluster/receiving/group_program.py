"""The program of a process that is a member of a trainer's torch.distributed group, and receives pushes by broadcasts.

It is a process of its own, because a broadcast that does not come can only be ended with its process.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence

import msgspec
import torch

from lorafleet.client.process_group import (
    WeightsGroupMember,
    join_group,
    open_store,
    say_joined,
)
from lorafleet.cluster.receiving.receiver_messages import (
    ReceiveJob,
    ReceiverReport,
    error_text,
    report,
    write_at,
)
from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace, complete_until
from lorafleet.protocol.framing import receive
from lorafleet.protocol.weights_group_place import WeightsGroupPlace
from lorafleet.sandbox.program import settings

WINDOW_BYTES = 32 << 20  # Tensors of about so many bytes are in flight together.


def main() -> None:
    server, place = socket.socket(fileno=0), WeightsGroupPlace(**settings())
    torch.set_num_threads(1)
    try:
        store, _ = open_store(place)
        say_joined(store)
        group = join_group(place, store)
    except Exception as error:
        report(server, ReceiverReport(has_ended=True, error=error_text(error)))
        return
    report(server, ReceiverReport(has_ended=True))
    device = torch.device("cuda" if place.backend == "nccl" else "cpu")
    for push in itertools.count():
        message = receive(server)
        if message is None:
            return
        try:
            group.say_ready(push)
            _receive_push(server, group, msgspec.json.decode(message, type=ReceiveJob), device)
        except Exception as error:
            report(server, ReceiverReport(has_ended=True, error=error_text(error)))
            return
        report(server, ReceiverReport(has_ended=True))


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
    tensors = [torch.empty(place.shape, dtype=getattr(torch, place.dtype), device=device) for place in window]
    group.broadcast(tensors)
    for place, tensor in zip(window, tensors, strict=True):
        write_at(memory, tensor.cpu().view(-1).view(torch.uint8).numpy().data, place.start)


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
