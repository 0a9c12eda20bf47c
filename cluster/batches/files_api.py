"""Serves the routes of /v1/files, the inputs and outputs of batches, which only their owner sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lorafleet.api.access.caller import Caller, caller_of, whose
from lorafleet.api.access.caller_admission import MAX_UPLOADS, add_admission
from lorafleet.api.access.work_threads import FILES, in_turn
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import FileBytes, UploadForm, describe
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_bodies import (
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
    page_of,
    shown_file,
)
from lorafleet.cluster.batches.batch_records import FileRecord, is_id, new_id, owner_of
from lorafleet.cluster.batches.batch_store import BatchStore, needed
from lorafleet.cluster.batches.file_store import BatchFiles
from lorafleet.cluster.batches.upload_form import UploadedFile, read_upload
from lorafleet.protocol.errors import BatchFileNotFound, InvalidRequest, QuotaExceeded
from lorafleet.protocol.limits import cut


class FilesApi:
    """The routes of files.

    Args:
        store: None if --batch-store is not set; all routes then say so.
        most_bytes: Returns the bytes that the files of all tenants may have.
    """

    def __init__(self, store: BatchStore | None, most_bytes: Callable[[], int]) -> None:
        self._store = store
        self._most_bytes = most_bytes

    def routes(self) -> list[Route]:
        return [
            ("POST", "/v1/files", "infer", self.create_file),
            ("GET", "/v1/files", "infer", self.list_files),
            ("GET", "/v1/files/{file_id}", "infer", self.show_file),
            ("GET", "/v1/files/{file_id}/content", "infer", self.read_file),
            ("DELETE", "/v1/files/{file_id}", "infer", self.delete_file),
        ]

    @describe("Upload the input of a batch", body=UploadForm, answer=FileObject)
    async def create_file(self, state: AppState, request: Request) -> Response:
        store, caller = needed(self._store), caller_of(request)
        add_admission(request.scope, state.work_bounds.enter("uploads of files", MAX_UPLOADS, caller))
        async with read_upload(request) as upload:
            await in_turn(FILES, self._check_quota, store, caller, upload.num_bytes)
            record = _record_of(store, caller, upload)
            await in_turn(FILES, store.files.add, record, upload.content)
        return json_response(shown_file(record))

    @describe("List the files of batches", query=FilesQuery, answer=FileList)
    async def list_files(self, _: AppState, request: Request) -> Response:
        query, files, owner = parse_query(request, FilesQuery), needed(self._store).files, owner_of(caller_of(request))
        records = await in_turn(FILES, lambda: files.records(files.names(owner)))
        if query.purpose is not None:
            records = [record for record in records if record.purpose == query.purpose]
        if query.order == "desc":
            records.reverse()
        ids = [record.file_id for record in records]
        if query.after is not None:
            if query.after not in ids:
                raise InvalidRequest(f"`after` is {cut(repr(query.after))}, which is no file of this list.", "after")
            records = records[ids.index(query.after) + 1 :]
        shown = [shown_file(record) for record in records[: query.limit]]
        return json_response(page_of(shown, has_more=len(shown) < len(records)))

    @describe("Show a file of a batch", answer=FileObject)
    async def show_file(self, _: AppState, request: Request) -> Response:
        return json_response(shown_file(await self._find(request)))

    @describe("Download a file of a batch", answer=FileBytes)
    async def read_file(self, state: AppState, request: Request) -> Response:
        caller = caller_of(request)
        add_admission(request.scope, state.work_bounds.enter("downloads of files", MAX_UPLOADS, caller))
        record = await self._find(request)
        pieces = _in_threads(needed(self._store).files.pieces(record))
        headers = {"content-length": str(record.num_bytes)}
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    @describe("Delete a file of a batch", answer=FileDeleted)
    async def delete_file(self, _: AppState, request: Request) -> Response:
        store, record = needed(self._store), await self._find(request)
        await in_turn(FILES, _check_unused, store, record)
        await in_turn(FILES, store.files.delete, record)
        return json_response({"id": record.file_id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> FileRecord:
        files, file_id = needed(self._store).files, request.path_params["file_id"]
        return await in_turn(FILES, find_file, files, owner_of(caller_of(request)), file_id)

    def _check_quota(self, store: BatchStore, caller: Caller, num_bytes: int) -> None:
        """Raises QuotaExceeded if the caller, or all callers together, would have too many files or bytes. Uploads at
        the same time do not see each other, so they may exceed the bounds once."""
        names, owner = store.files.names(), owner_of(caller)
        own = [name for name in names if name.owner == owner]
        of_one, most_of_one = sum(name.num_bytes for name in own), int(bounds.MAX_BYTES_OF_ONE * self._most_bytes())
        if len(own) >= bounds.MAX_FILES_OF_ONE:
            raise QuotaExceeded(
                f"{whose(caller)} has {len(own)} files; at most {bounds.MAX_FILES_OF_ONE} are allowed. Delete some."
            )
        if of_one + num_bytes > most_of_one:
            raise QuotaExceeded(
                f"The files of {whose(caller)} would have {of_one + num_bytes} bytes; at most {most_of_one} are "
                "allowed. Delete files that are not needed, or ask the operator to raise --batch-store-bytes."
            )
        if sum(name.num_bytes for name in names) + num_bytes > self._most_bytes():
            raise QuotaExceeded(
                f"The files of all tenants would have more than {self._most_bytes()} bytes. Ask the operator to raise "
                "--batch-store-bytes, or try again when files have expired."
            )


def find_file(files: BatchFiles, owner: str, file_id: str, param: str | None = None) -> FileRecord:
    """Finds an owner's file. Raises BatchFileNotFound."""
    record = files.find(owner, file_id) if is_id(file_id) else None
    if record is None:
        raise BatchFileNotFound(
            f"There is no file {cut(repr(file_id))}. It may have expired or been deleted, or belong to another tenant.",
            param,
        )
    return record


def _record_of(store: BatchStore, caller: Caller, upload: UploadedFile) -> FileRecord:
    now_s, lives = store.clock(), upload.fields.expires_after
    return FileRecord(
        new_id("file-", now_s),
        owner_of(caller),
        upload.num_bytes,
        int(now_s),
        int(now_s) + (bounds.DEFAULT_LIVES_S if lives is None else lives.seconds),
        upload.filename,
        "batch",
    )


def _check_unused(store: BatchStore, record: FileRecord) -> None:
    """Raises InvalidRequest if the file is the input of a batch that has not ended."""
    for name in store.open_names(record.owner):
        batch = store.find(name.owner, name.batch_id)
        is_input = batch is not None and batch.input_file_id == record.file_id
        if is_input and store.ended(name.batch_id) is None:
            raise InvalidRequest(
                f"The file is the input of the batch {name.batch_id}, which has not ended. Cancel the batch, or wait "
                "for its end.",
                "file_id",
            )


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await in_turn(FILES, next, pieces, None)) is not None:
        yield piece
