"""Lists the routes of files and batches."""

from __future__ import annotations

from collections.abc import Callable

from lorafleet.api.routes.build_api import Route
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.batches.batches_api import BatchesApi
from lorafleet.cluster.batches.files_api import FilesApi


def batch_routes(store: BatchStore | None = None, most_bytes: Callable[[], int] = lambda: 0) -> list[Route]:
    """Returns the routes, which answer that --batch-store is not set if there is no store."""
    return [*FilesApi(store, most_bytes).routes(), *BatchesApi(store).routes()]
