"""Tensors that come from a trainer's GPU: by CUDA IPC on one GPU, and over NCCL between two."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from lorafleet.client.admin import AdminClient
from lorafleet.client.client_errors import APIError
from lorafleet.client.group_verbs import GroupAnswer, JoinWeightsGroup, LeaveWeightsGroup
from lorafleet.client.shared_memory import shared_tensors
from lorafleet.client.weights_group import WeightsGroup
from lorafleet.cluster.admin.push_intake import PushIntake, taking_in
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.receiving.device_readers import DeviceReaders
from lorafleet.cluster.receiving.update_groups import UpdateGroups
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.errors import BodyTimeout, InvalidRequest
from lorafleet.protocol.weights_group_place import WeightsGroupPlace

pytestmark = pytest.mark.gpu
RECEIVE_S = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def some_tensors(device: str) -> dict[str, Tensor]:
    """Returns 84 MB, as a rank-16 adapter of an 8B model has, with dtypes and sizes that do not fit together."""
    made = {f"layers.{index}.lora_A.weight": torch.randn(16, 4096, device=device) for index in range(640)}
    made = {name: tensor.bfloat16() for name, tensor in made.items()} | {"bias": torch.arange(7.0, device=device)}
    return made | {"empty": torch.zeros(0, 4, device=device), "odd": torch.ones(3, dtype=torch.uint8, device=device)}


def on_host(tensors: dict[str, Tensor]) -> bytes:
    return save({name: tensor.cpu() for name, tensor in tensors.items()})


@asynccontextmanager
async def intake_for(push: AnnouncedPush, folder: Path, pool: ThreadPoolExecutor) -> AsyncIterator[PushIntake]:
    async with taking_in(push.config, push.file.num_bytes, FolderStore(folder), pool) as intake:
        intake.add(push.file.header)
        yield intake


async def sealed(intake: PushIntake) -> bytes:
    await intake.content.digest()
    content = map_sealed(await intake.seal())
    assert content is not None
    return bytes(content.weights)


def test_a_push_out_of_another_process_on_the_same_gpu_is_byte_for_byte_the_trainers(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    asyncio.run(_push_out_of_the_gpu(tmp_path, pool))


async def _push_out_of_the_gpu(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors("cuda:0")
    expected = on_host(tensors)
    readers = DeviceReaders("GPU-of-another-replica")
    try:
        for _ in range(2):
            device, shared = shared_tensors(tensors)
            assert device == f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # The name that a replica has for it.
            began_s = time.perf_counter()
            with shared as fields:
                push = AnnouncedPush.parse(json.dumps({"config": {}, **fields}).encode(), from_device=True)
                async with intake_for(push, tmp_path, pool) as intake:
                    await readers.receive(device, push, intake)
                    copied_s = time.perf_counter() - began_s
                    assert await sealed(intake) == expected
            print(f"CUDA IPC: {len(expected) / 1e6:.0f} MB in {copied_s * 1e3:.0f} ms with the sharing")
    finally:
        await readers.close()


@pytest.mark.parametrize("fault", ["device", "handle", "size"])
def test_a_wrong_handle_is_refused_and_harms_no_later_push(
    tmp_path: Path, pool: ThreadPoolExecutor, fault: str
) -> None:
    asyncio.run(_push_a_wrong_handle(tmp_path, pool, fault))


async def _push_a_wrong_handle(tmp_path: Path, pool: ThreadPoolExecutor, fault: str) -> None:
    tensors = {"a": torch.ones(4, device="cuda:0")}
    readers = DeviceReaders("GPU-of-another-replica")
    device, shared = shared_tensors(tensors)
    try:
        with shared as fields:
            right = {"config": {}, **fields}
            wrong: dict[str, Any] = dict(right)
            if fault == "handle":
                wrong["handle"] = "5a" * 64
            elif fault == "size":
                wrong["offset"] = 1 << 40
            named = "GPU-00000000-0000-0000-0000-000000000000" if fault == "device" else device
            with pytest.raises(InvalidRequest, match="cannot be"):
                await receive_once(readers, named, wrong, tmp_path, pool)
            assert await receive_once(readers, device, right, tmp_path, pool) == on_host(tensors)
    finally:
        await readers.close()


async def receive_once(
    readers: DeviceReaders, device: str, head: dict[str, Any], folder: Path, pool: ThreadPoolExecutor
) -> bytes:
    push = AnnouncedPush.parse(json.dumps(head).encode(), from_device=True)
    async with intake_for(push, folder, pool) as intake:
        await readers.receive(device, push, intake)
        return await sealed(intake)


class _Server:
    """The calls of an AdminClient that a group makes, without HTTP."""

    def __init__(self, groups: UpdateGroups, loop: asyncio.AbstractEventLoop) -> None:
        self._groups = groups
        self._loop = loop

    def join_weights_group(self, join: JoinWeightsGroup) -> GroupAnswer:
        place = WeightsGroupPlace(
            join.group_name, join.master_address, join.master_port, 2, 1, join.backend, join.timeout_s
        )
        asyncio.run_coroutine_threadsafe(self._groups.join(place), self._loop).result()
        return GroupAnswer(True, "")

    def leave_weights_group(self, leave: LeaveWeightsGroup) -> GroupAnswer:
        if not self._groups.has(leave.group_name):
            raise APIError("there is no such group")
        asyncio.run_coroutine_threadsafe(self._groups.leave(leave.group_name), self._loop).result()
        return GroupAnswer(True, "")


@pytest.mark.gpu(2)
def test_a_push_over_nccl_is_byte_for_byte_the_trainers(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    asyncio.run(_push_over_nccl(tmp_path, pool))


async def _push_over_nccl(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    device, _ = shared_tensors({"a": torch.ones(1, device="cuda:0")})
    groups = UpdateGroups((), device)
    server = cast(AdminClient, _Server(groups, asyncio.get_running_loop()))
    torch.cuda.set_device(1)
    tensors = some_tensors("cuda:1")
    expected = on_host(tensors)
    try:
        began_s = time.perf_counter()
        group = await asyncio.to_thread(_open_group, server)
        print(f"NCCL: the group was there after {time.perf_counter() - began_s:.2f} s")
        for _ in range(3):
            began_s = time.perf_counter()
            with group.sending(tensors) as fields:
                push = AnnouncedPush.parse(json.dumps({"config": {}, **fields}).encode(), from_device=False)
                async with intake_for(push, tmp_path, pool) as intake:
                    await groups.receive(group.name, push, intake, RECEIVE_S)
                    received_s = time.perf_counter() - began_s
                    assert await sealed(intake) == expected
            print(f"NCCL: {len(expected) / 1e6:.0f} MB in {received_s * 1e3:.0f} ms")
        with pytest.raises(BodyTimeout):
            await _push_less_than_announced(group, groups, tensors, tmp_path, pool)
        assert not groups.has(group.name)
        await asyncio.to_thread(group.close)
    finally:
        await groups.close()
        torch.cuda.set_device(0)


async def _push_less_than_announced(
    group: WeightsGroup, groups: UpdateGroups, tensors: dict[str, Tensor], folder: Path, pool: ThreadPoolExecutor
) -> None:
    with group.sending(tensors) as fields:
        more: Any = [*cast(list[Any], fields["tensors"]), {"name": "more", "dtype": "float32", "shape": [1]}]
        push = AnnouncedPush.parse(json.dumps({"config": {}, "tensors": more}).encode(), from_device=False)
        async with intake_for(push, folder, pool) as intake:
            await groups.receive(group.name, push, intake, timeout_s=2.0)


def _open_group(server: AdminClient) -> WeightsGroup:
    torch.cuda.set_device(1)
    return WeightsGroup(server, "127.0.0.1", backend="nccl", timeout_s=RECEIVE_S)
