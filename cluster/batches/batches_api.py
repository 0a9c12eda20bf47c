"""Serves /v1/batches, which only their owner sees. batch_runner.py does the work."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import Caller, caller_of, whose
from lorafleet.api.access.work_threads import FILES, in_turn
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_query, read_body
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import describe
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_bodies import (
    BatchesQuery,
    BatchList,
    BatchObject,
    BatchRequest,
    page_of,
    shown_batch,
)
from lorafleet.cluster.batches.batch_records import BatchRecord, BatchStage, is_id, new_id, owner_of
from lorafleet.cluster.batches.batch_store import BatchStore, needed
from lorafleet.cluster.batches.files_api import find_file
from lorafleet.protocol.errors import BatchNotFound, InvalidRequest, QuotaExceeded
from lorafleet.protocol.limits import cut


class BatchesApi:
    """The routes of batches. `store` is None if --batch-store is not set; all routes then say so."""

    def __init__(self, store: BatchStore | None) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        return [
            ("POST", "/v1/batches", "infer", self.create_batch),
            ("GET", "/v1/batches", "infer", self.list_batches),
            ("GET", "/v1/batches/{batch_id}", "infer", self.show_batch),
            ("POST", "/v1/batches/{batch_id}/cancel", "infer", self.cancel_batch),
        ]

    @describe("Create a batch", body=BatchRequest, answer=BatchObject)
    async def create_batch(self, state: AppState, request: Request) -> Response:
        store, body = needed(self._store), await read_body(state, request, BatchRequest)
        record = await in_turn(FILES, _create, store, caller_of(request), body)
        return json_response(shown_batch(record, BatchStage()))

    @describe("List the batches, the newest first", query=BatchesQuery, answer=BatchList)
    async def list_batches(self, _: AppState, request: Request) -> Response:
        query, store = parse_query(request, BatchesQuery), needed(self._store)
        return json_response(await in_turn(FILES, _list, store, owner_of(caller_of(request)), query))

    @describe("Show a batch", answer=BatchObject)
    async def show_batch(self, _: AppState, request: Request) -> Response:
        store, record = needed(self._store), await self._find(request)
        return json_response(shown_batch(record, await in_turn(FILES, store.stage, record.batch_id)))

    @describe("Cancel a batch", answer=BatchObject)
    async def cancel_batch(self, _: AppState, request: Request) -> Response:
        store, record = needed(self._store), await self._find(request)
        return json_response(shown_batch(record, await in_turn(FILES, store.cancel, record.batch_id)))

    async def _find(self, request: Request) -> BatchRecord:
        store, batch_id = needed(self._store), request.path_params["batch_id"]
        owner = owner_of(caller_of(request))
        record = await in_turn(FILES, store.find, owner, batch_id) if is_id(batch_id) else None
        if record is None:
            raise BatchNotFound(
                f"There is no batch {cut(repr(batch_id))}. It may have been deleted some time after its end, or belong "
                "to another tenant."
            )
        return record


def _create(store: BatchStore, caller: Caller, body: BatchRequest) -> BatchRecord:
    """Stores a new batch. Raises BatchFileNotFound, InvalidRequest or QuotaExceeded."""
    owner, now_s = owner_of(caller), store.clock()
    file = find_file(store.files, owner, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"The purpose of `input_file_id` is {file.purpose!r}; it must be 'batch'.", "input_file_id"
        )
    num_open = len(store.open_names(owner))
    if num_open >= bounds.MAX_OPEN_OF_ONE or not store.drop_oldest(owner, bounds.MAX_BATCHES_OF_ONE):
        raise QuotaExceeded(
            f"{whose(caller)} has {num_open} batches that have not ended; at most {bounds.MAX_OPEN_OF_ONE} are "
            "allowed. Wait for the end of one, or cancel one."
        )
    lives = body.output_expires_after
    record = BatchRecord(
        new_id("batch_", now_s),
        owner,
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        int(now_s),
        int(now_s) + bounds.WINDOW_S,
        body.metadata,
        bounds.DEFAULT_LIVES_S if lives is None else lives.seconds,
        caller.key_mark,
    )
    store.add(record)
    return record


def _list(store: BatchStore, owner: str, query: BatchesQuery) -> dict[str, object]:
    names = store.names(owner)[::-1]
    if query.after is not None:
        ids = [name.batch_id for name in names]
        if query.after not in ids:
            raise InvalidRequest(f"`after` is {cut(repr(query.after))}, which is no batch of this list.", "after")
        names = names[ids.index(query.after) + 1 :]
    found = [(store.find(owner, name.batch_id), name.batch_id) for name in names[: query.limit]]
    shown = [shown_batch(record, store.stage(batch_id)) for record, batch_id in found if record is not None]
    return page_of(shown, has_more=len(names) > query.limit)
