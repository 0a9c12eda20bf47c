"""Reads the upload of a file: multipart/form-data, whose file goes to a temporary file on the disk."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Scope

from lorafleet.api.request.parsing import check_encoding, parse_object
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_bodies import UploadFields
from lorafleet.protocol.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from lorafleet.protocol.limits import cut

_FORM = "multipart/form-data"
# The characters that RFC 2046 allows in a boundary, within quotes or without.
_BOUNDARY = re.compile(
    r""";\s*boundary=(?:"([0-9A-Za-z'()+_,\-./:=? ]{1,70})"|([0-9A-Za-z'+_\-.]{1,70})\s*(?:;|$))""", re.I
)
_NESTED = re.compile(r"(\w{1,64})\[(\w{1,64})\]")  # openai-python writes expires_after[seconds].


@dataclass(frozen=True, slots=True)
class UploadedFile:
    fields: UploadFields
    filename: str
    num_bytes: int
    content: BinaryIO  # A temporary file, which ends with the block.


@asynccontextmanager
async def read_upload(request: Request) -> AsyncIterator[UploadedFile]:
    """Yields what the client uploads. Raises InvalidRequest; its subclass BodyTooLarge as soon as it is too long."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != _FORM:
        raise UnsupportedMediaType(f"The header Content-Type is {cut(given)!r}; send the file as {_FORM}.")
    check_encoding(request)
    bounded = Request(_without_charset(request.scope, given), _Counted(request).receive)
    try:
        async with asyncio.timeout(bounds.MAX_UPLOAD_S):
            form = await bounded.form(max_files=1, max_fields=bounds.MAX_FIELDS, max_part_size=bounds.MAX_FORM_BYTES)
    except TimeoutError:
        raise BodyTimeout(f"The upload did not arrive within {bounds.MAX_UPLOAD_S:g} s.") from None
    except HTTPException as error:
        raise InvalidRequest(f"The body is not a valid form: {cut(str(error.detail))}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest(
                "`file` is missing, or is not a file; send the lines as a part with a filename.", "file"
            )
        fields = _fields([(name, value) for name, value in form.multi_items() if name != "file"])
        filename = _checked_filename(file.filename or "")
        num_bytes = file.size or 0
        if not 1 <= num_bytes <= bounds.MAX_FILE_BYTES:
            raise InvalidRequest(f"The file has {num_bytes} bytes; it must have 1 to {bounds.MAX_FILE_BYTES}.", "file")
        yield UploadedFile(fields, filename, num_bytes, file.file)
    finally:
        await bounded.close()


def _without_charset(scope: Scope, content_type: str) -> Scope:
    """Returns the scope with a content type that has a boundary alone.

    RFC 7578 defines no other parameter. The library would look a `charset` up among all of Python's codecs, of which
    some raise errors of their own. Raises InvalidRequest if there is no boundary.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidRequest(
            f"The header Content-Type is {cut(content_type)!r}; it needs a boundary of 1 to 70 characters."
        )
    boundary = found[1] or found[2]
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", f'{_FORM}; boundary="{boundary}"'.encode())]}


def _checked_filename(filename: str) -> str:
    """Returns the name of a file. Raises InvalidRequest for one that would be a path, or act on a terminal."""
    if not 1 <= len(filename) <= bounds.MAX_FILENAME_CHARS:
        raise InvalidRequest(
            f"The filename has {len(filename)} characters; it must have 1 to {bounds.MAX_FILENAME_CHARS}.", "file"
        )
    if not filename.isprintable() or set(filename) & set("/\\") or filename in (".", ".."):
        raise InvalidRequest(
            f"The filename is {cut(repr(filename))}; it must be the name of a file, without folders and control "
            "characters.",
            "file",
        )
    return filename


class _Counted:
    """Counts the bytes of a body while they are read."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._request.receive()
        self._num_bytes += len(message.get("body", b""))
        most = bounds.MAX_FILE_BYTES + bounds.MAX_FORM_BYTES
        if self._num_bytes > most:
            raise BodyTooLarge(
                f"The upload has more than {most} bytes. A file may have {bounds.MAX_FILE_BYTES}; split the input into "
                "several batches."
            )
        return message


def _fields(given: list[tuple[str, str | UploadFile]]) -> UploadFields:
    """Checks the texts of a form. Raises InvalidRequest."""
    fields: dict[str, object] = {}
    for name, value in given:
        nested = _NESTED.fullmatch(name)
        target = fields
        if nested is not None:
            inner = fields.setdefault(nested[1], {})
            if not isinstance(inner, dict):
                raise InvalidRequest(f"`{cut(nested[1])}` is given twice.", cut(nested[1]))
            target, name = inner, nested[2]
        if name in target:
            raise InvalidRequest(f"`{cut(name)}` is given twice.", cut(name))
        is_number = isinstance(value, str) and value.isdecimal() and len(value) < 20
        target[name] = int(str(value)) if is_number else value
    return parse_object(fields, UploadFields)
