"""Attacks with uploads that are slow, large, cut off, or odd tar files."""

from __future__ import annotations

import asyncio
import io
import itertools
import tarfile
from collections.abc import AsyncIterator

from noisy.hostile import Attack, Call, Hostile
from noisy.pushing import good_files, tar_of, upload_of

MIB = 1 << 20
LARGE_MIB = 256  # The size of one upload; the disk must have room for a few.


async def slow_uploads(hostile: Hostile) -> None:
    """Starts fifty uploads that send a byte every half second."""

    async def slow() -> None:
        name = hostile.new_name()
        async with hostile.connection() as (_, writer):
            writer.write(hostile.head("PUT", f"/v1/adapters/{name}/files", "content-length: 1000000"))
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.5)

    await hostile.repeated(slow, 50)


async def large_uploads(hostile: Hostile) -> None:
    """Uploads 256 MiB of weights that are all zero."""
    info = tarfile.TarInfo("adapter_model.safetensors")
    info.size = LARGE_MIB * MIB

    async def content() -> AsyncIterator[bytes]:
        yield info.tobuf()
        for _ in range(LARGE_MIB):
            yield bytes(MIB)
        yield bytes(1024)

    async def once() -> None:
        await hostile.send(Call("PUT", f"/v1/adapters/{hostile.new_name()}/files", content))

    await hostile.repeated(once, 2)


async def truncated_uploads(hostile: Hostile) -> None:
    """Sends uploads that end in the middle of the tar, or of the body."""
    packed = tar_of(good_files(hostile))

    async def once() -> None:
        await hostile.send(upload_of(hostile.new_name(), packed[: len(packed) // 2]))
        async with hostile.connection() as (_, writer):
            length = f"content-length: {len(packed)}"
            writer.write(hostile.head("PUT", f"/v1/adapters/{hostile.new_name()}/files", length) + packed[:9000])
            await writer.drain()

    await hostile.repeated(once)


async def tars_of_many_members(hostile: Hostile) -> None:
    """Uploads tars of a hundred thousand members, with names of files that serving reads, and of others."""
    served = tarfile.TarInfo("adapter_config.json").tobuf()
    other = tarfile.TarInfo("x").tobuf()
    tars = [served * 100_000 + bytes(1024), other * 100_000 + bytes(1024)]
    await _upload(hostile, tars)


async def tars_with_holes(hostile: Hostile) -> None:
    """Uploads tars whose members are sparse files of terabytes, links, devices, or have megabytes of metadata."""
    tars = [_tar_with(kind) for kind in (tarfile.GNUTYPE_SPARSE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)]
    described = tarfile.TarInfo("x")
    described.type, described.size = tarfile.XHDTYPE, 32 * MIB
    tars.append(described.tobuf() + b"9 path=a\n" * (32 * MIB // 9 + 1000))
    await _upload(hostile, tars)


def _tar_with(kind: bytes) -> bytes:
    info = tarfile.TarInfo("adapter_model.safetensors")
    info.type, info.linkname, info.size = kind, "/etc/passwd", (1 << 40) if kind == tarfile.GNUTYPE_SPARSE else 0
    packed = io.BytesIO()
    packed.write(info.tobuf(tarfile.GNU_FORMAT))
    packed.write(bytes(1024))
    return packed.getvalue()


async def _upload(hostile: Hostile, tars: list[bytes]) -> None:
    calls = (upload_of(hostile.new_name(), tar) for tar in itertools.cycle(tars))
    await hostile.flood_with(calls, width=4)


ATTACKS: tuple[Attack, ...] = (
    *(slow_uploads, large_uploads, truncated_uploads, tars_of_many_members, tars_with_holes),
)
