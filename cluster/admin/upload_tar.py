"""Unpacks the body of an upload: an uncompressed tar of an adapter's files, which costs no more than its bytes."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from starlette.requests import Request

from lorafleet.api.access.work_threads import PUSHED_BYTES, in_turn
from lorafleet.api.request.parsing import check_encoding
from lorafleet.cluster.admin.pushing import AdapterAdmin, as_store_error
from lorafleet.cluster.admin.staging_room import FILE_NAMES
from lorafleet.cluster.admin.storage_quota import StorageQuota
from lorafleet.protocol.adapter_formats.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    OPTIONAL_NAMES,
    SAFETENSORS_NAME,
)
from lorafleet.protocol.admin_verbs import PushTerms
from lorafleet.protocol.errors import AdapterMalformed, BodyTooLarge
from lorafleet.protocol.limits import cut
from lorafleet.protocol.outside.header_numbers import header_number
from lorafleet.protocol.strict_json import shown

MAX_UPLOAD_BYTES = MAX_CONFIG_BYTES + MAX_WEIGHTS_BYTES + sum(OPTIONAL_NAMES.values())

UPLOAD_COPIES = 2  # The tar, and the files in it.
MAX_TAR_BYTES = 64 << 10  # Bytes of a usual tar besides those of an adapter's files.

MAX_DESCRIPTION_BYTES = 64 << 10  # Largest pax header of a file in an uploaded tar: its times and owner.
MAX_TAR_HEADERS = 4 * len(FILE_NAMES)  # A file may have several pax headers, and each of them counts.


@asynccontextmanager
async def unpacked(request: Request, admin: AdapterAdmin, name: str, terms: PushTerms) -> AsyncIterator[Path]:
    """Unpacks the body, a tar, into a temporary folder, and yields the folder. Only the files that stage() may read are
    unpacked. `name` is the full name of the adapter that they belong to.

    The bytes that the client declares, or else those that arrive, are counted before they are written. Raises
    BodyTooLarge, and QuotaExceeded for an upload that is larger than all that its tenant may store.
    """
    check_encoding(request)
    with (
        admin.staging.staging(name) as staged,
        tempfile.TemporaryDirectory(prefix="lorafleet-upload-") as folder,
    ):
        size, counted = 0, header_number(request.headers.get("content-length", "")) or 0
        _check_size(name, counted, terms)
        staged.add(UPLOAD_COPIES * counted)
        with tempfile.TemporaryFile(dir=folder) as packed:
            async for part in request.stream():
                size += len(part)
                if size > counted:
                    _check_size(name, size, terms)
                    staged.add(UPLOAD_COPIES * (size - counted))
                    counted = size
                with as_store_error():
                    await in_turn(PUSHED_BYTES, packed.write, part)
            packed.seek(0)
            await admin.run_in_turn(name, lambda: unpack(packed, Path(folder)))
        staged.remove(counted)  # The tar is gone, and the files are left.
        yield Path(folder)


def _check_size(name: str, num_bytes: int, terms: PushTerms) -> None:
    if num_bytes > MAX_UPLOAD_BYTES:
        raise BodyTooLarge(f"The upload has more than {MAX_UPLOAD_BYTES} bytes; no adapter is that large.")
    StorageQuota.check_bytes(name, num_bytes - MAX_TAR_BYTES, terms)


def _check_headers(packed: IO[bytes]) -> None:
    """Raises TarError if the tar has too many headers, or headers that are unsafe to read. tarfile reads a pax header
    whole into memory, and fills the holes of a sparse file with as many zeros as its header of 512 bytes asks for."""
    num_headers = 0
    while len(block := packed.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE and any(block):
        num_headers += 1
        if num_headers > MAX_TAR_HEADERS:
            raise tarfile.TarError(f"it has more than {MAX_TAR_HEADERS} entries")
        size = tarfile.nti(block[124:136])  # type: ignore[attr-defined]  # its own reader of numbers, not in the stubs
        described = block[156:157] in (tarfile.XHDTYPE, tarfile.XGLTYPE) and 0 <= size <= MAX_DESCRIPTION_BYTES
        if not described and (block[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE) or size < 0):
            raise tarfile.TarError("it contains something other than files, or pax headers that are too large")
        packed.seek(-(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, io.SEEK_CUR)
    packed.seek(0)


def unpack(packed: IO[bytes], folder: Path) -> None:
    try:
        _check_headers(packed)
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is None or member.name not in FILE_NAMES:
                    raise AdapterMalformed(
                        f"the upload contains {shown(member.name)}; it must be an uncompressed tar of {CONFIG_NAME} "
                        f"and {SAFETENSORS_NAME} (or {BIN_NAME}), optionally with {', '.join(OPTIONAL_NAMES)}, and "
                        "without other folders."
                    )
                if (folder / member.name).exists():
                    raise AdapterMalformed(f"the upload contains {member.name} twice.")
                (folder / member.name).parent.mkdir(exist_ok=True)
                with (folder / member.name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, ValueError) as error:  # ValueError: a malformed number in a pax header.
        raise AdapterMalformed(
            f"the upload is not an uncompressed tar of an adapter's files: {cut(str(error))}."
        ) from error
