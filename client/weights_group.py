"""The trainer's end of a torch.distributed group by which adapters go to a server.

with AdminClient(URL, KEY) as client, WeightsGroup(client, "10.0.0.5") as group:
    client.push_from_distributed("policy", tensors, config, group)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lorafleet.client.client_errors import APIError
from lorafleet.client.group_verbs import JoinWeightsGroup, LeaveWeightsGroup
from lorafleet.client.tensor_packing import entries_of, in_file_order
from lorafleet.protocol.weights_group_place import GroupBackend, WeightsGroupPlace

if TYPE_CHECKING:
    from lorafleet.client.admin import AdminClient

_POLL_S = 0.001  # Time between two looks whether the server is there. A look is a call within this machine.


class WeightsGroup:
    """A group of this process, which is rank 0, and the server, which is rank 1 however many GPUs it has.

    Args:
        address: This machine's address, as the server reaches it. Other addresses than loopback must be allowed by the
            server's --push-hosts.
        port: 0 for any free one.
        backend: nccl sends from GPU to GPU, and both need one of their own; gloo sends from host memory.
        timeout_s: Longest time to meet the server, and for the broadcasts of each push.

    Raises APIStatusError if the server does not join, and torch's DistError or RuntimeError.
    """

    def __init__(
        self,
        client: AdminClient,
        address: str,
        *,
        name: str = "weight_update_group",
        port: int = 0,
        backend: GroupBackend = "nccl",
        timeout_s: float = 60.0,
    ) -> None:
        from lorafleet.client import process_group  # It needs torch, which other clients do not.

        self.name = name
        self.timeout_s = timeout_s
        self._client = client
        self._num_pushes = 0  # Pushes for which the server was ready.
        place = WeightsGroupPlace(name, address, port, 2, 0, backend, timeout_s)
        store, port = process_group.open_store(place)
        join = JoinWeightsGroup(name, address, port, 1, 2, backend, timeout_s)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(client.join_weights_group, join)
            while not process_group.has_joined(store) and not joining.done():
                time.sleep(_POLL_S)
            if joining.done():
                joining.result()  # Raises the server's error.
            self._member = process_group.join_group(place, store)
            joining.result()
        self._device = "cuda" if backend == "nccl" else "cpu"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group on both sides. A group that has ended on the server is left here."""
        with contextlib.suppress(APIError):
            self._client.leave_weights_group(LeaveWeightsGroup(self.name))
        self._member.destroy()

    @contextmanager
    def sending(self, tensors: Mapping[str, Any]) -> Iterator[dict[str, object]]:
        """Sends the tensors from another thread once the server waits for them, which it does while this is entered.
        Yields what the push's head says about them."""
        ordered = {name: tensor.detach().to(self._device) for name, tensor in in_file_order(tensors).items()}
        contiguous = [tensor.contiguous() for tensor in ordered.values()]
        self._member.wait_for_gpu()
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            sent: Future[None] = pool.submit(self._send, contiguous, is_over)
            try:
                yield {"tensors": entries_of(ordered)}
            except BaseException:
                is_over.set()
                self._member.abort_if_running(sent)
                raise
        sent.result()

    def _send(self, tensors: list[Any], is_over: threading.Event) -> None:
        while not self._member.is_ready(self._num_pushes):
            if is_over.wait(_POLL_S):
                return  # The server has refused the push before it waited for tensors.
        self._num_pushes += 1
        self._member.broadcast(tensors)
