"""Declares the options of a server for /v1/files and /v1/batches, which AppArgs (cluster/config.py) includes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from lorafleet.cluster.store_uri import StoreUri
from lorafleet.protocol.limits import BATCH_STORE_BYTES
from lorafleet.protocol.options import Change


def _absolute_folder(value: Any) -> Any:
    """Makes a folder absolute, since replicas run in another working directory. Returns the URI of a bucket
    unchanged."""
    return str(Path(value).expanduser().absolute()) if isinstance(value, str) and "://" not in value else value


class BatchOptions(BaseModel, frozen=True):
    """The part of AppArgs that concerns files and batches."""

    batch_store: Annotated[StoreUri | None, BeforeValidator(_absolute_folder)] = Field(
        None,
        description="Where /v1/files and /v1/batches store files: a folder that all nodes see, or s3://bucket/prefix. "
        "Default: these routes are off.",
    )
    batch_store_bytes: Annotated[int, Change.IN_REPLICA] = Field(
        BATCH_STORE_BYTES,
        ge=1,
        description="With batch_store: bytes of all files there. One tenant may use half of them.",
    )
    batch_concurrency: Annotated[int, Change.IN_REPLICA] = Field(
        64,
        ge=1,
        le=4096,
        description="With batch_store: lines of all batches that are in flight at a time, in the whole cluster.",
    )
