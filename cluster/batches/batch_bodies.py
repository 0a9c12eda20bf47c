"""Declares the requests and answers of /v1/files and /v1/batches, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_records import BatchRecord, BatchStage, FileRecord
from lorafleet.protocol.limits import FILE_LIVES_S, MAX_LABEL_CHARS, Range

_exactly = with_config(ConfigDict(extra="forbid"))

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
AnId = Annotated[str, AtMost(MAX_LABEL_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, AtMost(bounds.MAX_METADATA_KEY_CHARS)], Annotated[str, AtMost(bounds.MAX_METADATA_CHARS)]],
    AtMost(bounds.MAX_METADATA),
]


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Within(FILE_LIVES_S)]


class UploadFields(Strict):
    """The fields of an upload besides its file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FilesQuery(Strict):
    purpose: Annotated[str, AtMost(MAX_LABEL_CHARS)] | None = None
    limit: Annotated[int, Within(Range(1, bounds.MAX_FILES_LISTED))] = bounds.MAX_FILES_LISTED
    order: Literal["asc", "desc"] = "desc"
    after: AnId | None = None  # ID of the last file of the previous page.


class BatchRequest(Strict):
    input_file_id: AnId
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesQuery(Strict):
    limit: Annotated[int, Within(bounds.BATCHES_LISTED)] = 20
    after: AnId | None = None  # ID of the last batch of the previous page.


@_exactly
class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


@_exactly
class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@_exactly
class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


@_exactly
class ShownFault(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


@_exactly
class ShownFaults(TypedDict):
    object: Literal["list"]
    data: list[ShownFault]


@_exactly
class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


@_exactly
class ShownUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


@_exactly
class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: ShownFaults | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: ShownUsage
    metadata: dict[str, str] | None


@_exactly
class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def shown_file(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


def shown_batch(record: BatchRecord, stage: BatchStage) -> dict[str, Any]:
    faults = [
        {"code": fault.code, "message": fault.message, "line": fault.line, "param": fault.param}
        for fault in stage.errors
    ]
    ended: dict[str, int | None] = {f"{status}_at": None for status in ("completed", "failed", "expired", "cancelled")}
    if stage.has_ended:
        ended[f"{stage.ending}_at"] = stage.ended_s
    usage = stage.usage
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": stage.status,
        "output_file_id": stage.output_file_id,
        "error_file_id": stage.error_file_id,
        "created_at": record.created_s,
        "in_progress_at": stage.in_progress_s,
        "expires_at": record.expires_s,
        "finalizing_at": stage.finalizing_s,
        "cancelling_at": stage.cancelling_s,
        **ended,
        "request_counts": {
            "total": stage.num_lines,
            "completed": stage.num_completed,
            "failed": stage.num_failed,
        },
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": record.metadata,
    }


def page_of(shown: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }
