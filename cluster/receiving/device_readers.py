"""Receives pushes out of memory that a trainer shares on this node, by a process for each GPU (device_program.py)."""

from __future__ import annotations

import asyncio
import re

from lorafleet.cluster.admin.push_intake import PushIntake
from lorafleet.cluster.receiving.receiver_process import ReceiverFailed, ReceiverGone, ReceiverProcess
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.cuda_driver import HANDLE_BYTES
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest, Overloaded

START_S = 60.0  # Time in which a process must have made its CUDA context.
COPY_S = 120.0  # Time in which it must have copied a push, or the pushes before it.
_PROGRAM = "lorafleet.cluster.receiving.device_program"
_GPU = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HEX = re.compile(r"([0-9a-f]{2})+")


class DeviceReaders:
    """The processes of one replica, which start with the first push from their GPU.

    Args:
        own_device: The replica's GPU, or "cpu" if it has none. Only then "cpu" may share memory.
    """

    def __init__(self, own_device: str) -> None:
        self._own_device = own_device
        self._readers: dict[str, ReceiverProcess] = {}
        self._changing = asyncio.Lock()
        self._is_closed = False

    async def receive(self, device: str, push: AnnouncedPush, intake: PushIntake) -> None:
        """Copies a push's tensors. Raises InvalidRequest if the device is not of this node, or its memory cannot be
        opened, and AdapterMalformed."""
        self.check(device, push)
        while True:
            reader = await self._reader(device)
            try:
                return await reader.receive(push, intake, COPY_S)
            except ReceiverGone:  # The push before it has failed, which is no fault of this one.
                continue
            except ReceiverFailed as error:
                raise InvalidRequest(
                    f"The tensors cannot be read from {device}: {error}. Nothing was changed."
                ) from None

    def check(self, device: str, push: AnnouncedPush) -> None:
        if device == "cpu":
            if self._own_device != "cpu":
                raise InvalidRequest(
                    "`device` is cpu, but this server has a GPU; send tensors in host memory with push_tensors.",
                    "device",
                )
        elif not _GPU.fullmatch(device):
            raise InvalidRequest("`device` must be the UUID of a GPU, as `nvidia-smi -L` shows it.", "device")
        elif self._own_device == "cpu":
            raise InvalidRequest("`device` is a GPU, but this server runs without one; use push_tensors.", "device")
        if not _HEX.fullmatch(push.handle) or len(push.handle) > 2 * HANDLE_BYTES:
            raise AdapterMalformed(f"`handle` must have up to {2 * HANDLE_BYTES} hexadecimal digits.")
        if device != "cpu" and len(push.handle) != 2 * HANDLE_BYTES:
            raise AdapterMalformed(f"`handle` must have {2 * HANDLE_BYTES} hexadecimal digits for a GPU's memory.")

    async def close(self) -> None:
        self._is_closed = True
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.end() for reader in readers))

    def _check_open(self) -> None:
        if self._is_closed:
            raise Overloaded("This replica is stopping.")

    async def _reader(self, device: str) -> ReceiverProcess:
        async with self._changing:
            self._check_open()
            reader = self._readers.get(device)
            if reader is not None and reader.is_alive:
                return reader
            if reader is not None:
                await reader.end()
            reader = await ReceiverProcess.start(_PROGRAM, {"device": device}, "" if device == "cpu" else device)
            try:
                self._check_open()  # It may have been closed meanwhile.
            except Overloaded:
                await reader.end()
                raise
            self._readers[device] = reader
            try:
                await reader.wait_until_started(START_S)
            except ReceiverFailed as error:
                del self._readers[device]
                raise InvalidRequest(
                    f"The GPU {device} cannot be opened on this replica's node: {error}. Use push_tensors, or "
                    "push_from_distributed.",
                    "device",
                ) from None
            return reader
