"""The replica's side of a process that receives the tensors of pushes: starts it, sends it jobs, and ends it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from lorafleet.api.access.work_threads import UPKEEP, in_turn
from lorafleet.cluster.admin.push_intake import PushIntake
from lorafleet.cluster.receiving.receiver_messages import MAX_REPORT_BYTES, ReceiveJob, ReceiverReport
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.framing import FrameCutter, framed
from lorafleet.sandbox.process import RunningProgram, command_of, start_program

_PART_BYTES = 64 << 10
# Variables by which operators choose network devices and libraries. All others may hold secrets.
_PASSED_ON = ("NCCL_", "GLOO_", "LD_LIBRARY_PATH", "CUDA_HOME", "PATH")


class ReceiverFailed(Exception):
    """An error that means that a job has failed. If it had begun, its process has been ended. The message has the
    reason."""


class ReceiverGone(ReceiverFailed):
    """An error that means that the process had ended before it got the job, as when the job before it failed."""


class ReceiverProcess:
    """One process, which does one job after another."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._program.socket.setblocking(False)
        self._turn = asyncio.Lock()
        self.has_ended = False

    @classmethod
    async def start(cls, module: str, settings: Mapping[str, object], visible_devices: str) -> ReceiverProcess:
        """Starts a module as the process's program. `visible_devices` are the GPUs that it sees, in CUDA's notation."""
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        environment |= {"CUDA_VISIBLE_DEVICES": visible_devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return cls(await in_turn(UPKEEP, start_program, command_of(module), settings, (), environment))

    async def wait_until_started(self, timeout_s: float) -> None:
        """Waits for the program's word that it can take jobs. Raises ReceiverFailed."""
        async with self._job(timeout_s):
            await self._follow(None)

    async def receive(self, push: AnnouncedPush, intake: PushIntake, timeout_s: float) -> None:
        """Has the process write the push's tensors into the intake's memory, after the pushes before it.

        Raises ReceiverFailed, also if its turn does not come in time. Only then the process goes on. Raises
        ReceiverGone if the process had ended before.
        """
        job = ReceiveJob(intake.path, push.file.num_bytes, push.file.tensors, push.handle, push.offset)
        async with self._job(timeout_s):
            if self.has_ended:
                raise ReceiverGone("its process has ended")
            await asyncio.get_running_loop().sock_sendall(self._program.socket, framed(msgspec.json.encode(job)))
            await self._follow(intake)

    @property
    def is_alive(self) -> bool:
        return not self.has_ended and self._program.process.poll() is None

    async def end(self) -> None:
        """Kills the process, and leaves no zombie."""
        if self.has_ended:
            return
        self.has_ended = True
        await in_turn(UPKEEP, self._program.stop)
        async with self._turn:  # Nobody waits for the socket any more.
            self._program.socket.close()

    @asynccontextmanager
    async def _job(self, timeout_s: float) -> AsyncIterator[None]:
        """Waits for the process's turn, and ends the process if the job fails then. A job that gives up before its turn
        does not harm the one that the process does."""
        has_begun = False
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                has_begun = True
                yield
        except BaseException as error:
            if has_begun:
                await self.end()
            if isinstance(error, TimeoutError):
                subject = "it" if has_begun else "the pushes before it"
                raise ReceiverFailed(f"{subject} took longer than {timeout_s:g} s") from None
            if isinstance(error, OSError):
                raise ReceiverFailed("its process has ended") from error
            raise

    async def _follow(self, intake: PushIntake | None) -> None:
        """Follows the process's reports until the job has ended. Raises ReceiverFailed."""
        cutter, loop = FrameCutter(MAX_REPORT_BYTES), asyncio.get_running_loop()
        while part := await loop.sock_recv(self._program.socket, _PART_BYTES):
            for message in cutter.cut(part):
                said = msgspec.json.decode(message, type=ReceiverReport)
                if said.error:
                    raise ReceiverFailed(said.error)
                if intake is not None and said.num_bytes:
                    intake.arrived(said.num_bytes)
                if said.has_ended:
                    return
        raise ReceiverFailed("its process has ended")
